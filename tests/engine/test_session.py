"""What a session accepts and refuses, and that a refused step leaves the KV cache alone."""

from __future__ import annotations

import dataclasses
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pelton.engine
from pelton.builder.probe import Piece, make_batch
from pelton.engine import native_runner
from pelton.engine.batch import InputBatch
from pelton.engine.kv_cache import choose_num_blocks
from pelton.engine.session import Session
from pelton.errors import ConfigError, EngineError, PeltonError
from pelton.kernels import native

BLOCKS = 12


@pytest.fixture(scope="module")
def session(tiny_engine: Path) -> Iterator[Session]:
    with Session(tiny_engine, kv_blocks=BLOCKS, runner="reference") as opened:
        yield opened


def good(session: Session) -> InputBatch:
    """Two sequences of 9 and 3 tokens."""
    pieces = [
        Piece(tokens=np.arange(9, dtype=np.int32), start=0, blocks=np.array([3, 1], np.int32)),
        Piece(tokens=np.arange(3, dtype=np.int32), start=0, blocks=np.array([7], np.int32)),
    ]
    return make_batch(pieces, session.config, logits=[8, 11])


def with_group(batch: InputBatch, **changes: Any) -> InputBatch:
    return dataclasses.replace(batch, groups=(dataclasses.replace(batch.groups[0], **changes),))


def changed(array: np.ndarray[Any, Any], index: Any, value: int) -> np.ndarray[Any, Any]:
    copy = array.copy()
    copy[index] = value
    return copy


def too_many_tokens(b: InputBatch) -> InputBatch:
    long = np.zeros(41, np.int32)
    return dataclasses.replace(b, input_ids_T=long, positions_T=long)


def too_many_sequences(b: InputBatch) -> InputBatch:
    five = np.ones(5, np.int32)
    return with_group(
        b,
        seq_lens_B=five,
        cu_seqlens=np.array([0, 1, 2, 3, 4, 12], np.int32),
        block_table_BM=np.zeros((5, 8), np.int32),
    )


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (too_many_tokens, r"1 to 40 tokens \(max_num_tokens\), not 41"),
        (too_many_sequences, r"1 to 4 sequences \(max_batch_size\), not 5"),
        (
            lambda b: dataclasses.replace(
                b, input_ids_T=np.zeros(0, np.int32), positions_T=np.zeros(0, np.int32)
            ),
            "tokens .max_num_tokens., not 0",
        ),
        (
            lambda b: dataclasses.replace(b, input_ids_T=b.input_ids_T.astype(np.int64)),
            r"input_ids must be contiguous int32 of shape \(12,\), not int64",
        ),
        (
            lambda b: dataclasses.replace(b, positions_T=b.positions_T[:-1]),
            "positions must be contiguous int32",
        ),
        (
            lambda b: dataclasses.replace(b, input_ids_T=changed(b.input_ids_T, 3, 101)),
            r"input_ids must lie in 0\.\.100",
        ),
        (
            lambda b: dataclasses.replace(b, positions_T=changed(b.positions_T, 0, 64)),
            r"positions must lie in 0\.\.63",
        ),
        (
            lambda b: dataclasses.replace(b, logits_indices_N=np.array([12], np.int32)),
            r"logits_indices must lie in 0\.\.11",
        ),
        (
            lambda b: dataclasses.replace(b, logits_indices_N=np.array([5, 5], np.int32)),
            "logits_indices must be ascending",
        ),
        (lambda b: dataclasses.replace(b, groups=b.groups * 2), "has 1 KV groups, the batch 2"),
        (
            lambda b: with_group(b, slot_mapping_T=changed(b.groups[0].slot_mapping_T, 0, BLOCKS * 8)),
            r"slot_mapping\.0 must lie in -1\.\.95",
        ),
        (
            lambda b: with_group(b, slot_mapping_T=changed(b.groups[0].slot_mapping_T, 0, -2)),
            r"slot_mapping\.0 must lie in -1\.\.95",
        ),
        (
            lambda b: with_group(b, block_table_BM=changed(b.groups[0].block_table_BM, (1, 0), BLOCKS)),
            r"block_table\.0 must lie in 0\.\.11",
        ),
        (
            lambda b: with_group(b, block_table_BM=b.groups[0].block_table_BM[:, :4]),
            r"block_table\.0 must be contiguous int32 of shape \(2, 8\)",
        ),
        (
            lambda b: with_group(b, cu_seqlens=changed(b.groups[0].cu_seqlens, 2, 11)),
            "cu_seqlens must rise from 0 to the number of tokens, 12",
        ),
        (
            lambda b: with_group(b, cu_seqlens=changed(b.groups[0].cu_seqlens, 1, 13)),
            "cu_seqlens must rise from 0",
        ),
        (
            lambda b: with_group(b, seq_lens_B=changed(b.groups[0].seq_lens_B, 0, 8)),
            "seq_lens must lie between",
        ),
        (
            lambda b: with_group(b, seq_lens_B=changed(b.groups[0].seq_lens_B, 0, 65)),
            r"seq_lens must lie between .* 64 \(max_seq_len\)",
        ),
    ],
)
def test_a_step_beyond_the_contract_is_refused_before_kv_is_touched(
    session: Session, spoil: Any, message: str
) -> None:
    batch = good(session)
    session.run(batch)
    before = [cache.copy() for cache in session._caches.k.values()]
    with pytest.raises(ValueError, match=message):
        session.run(spoil(batch))
    for cache, old in zip(session._caches.k.values(), before, strict=True):
        np.testing.assert_array_equal(cache, old)


def test_unknown_outputs_are_refused(session: Session) -> None:
    with pytest.raises(ValueError, match="the engine has no tensor 'nonsense'"):
        session.run(good(session), ["nonsense"])


def test_slots_of_minus_one_write_nothing(session: Session) -> None:
    batch = good(session)
    for cache in session._caches.v.values():
        cache[:] = 7
    session.run(with_group(batch, slot_mapping_T=np.full(12, -1, np.int32)))
    assert all((cache == 7).all() for cache in session._caches.v.values())


def test_kv_blocks_default_to_what_the_engine_was_built_for(session: Session) -> None:
    assert choose_num_blocks(session.config, free=10**9) == (4 * 8,)
    assert session.num_blocks == (BLOCKS,)


def test_kv_blocks_shrink_to_what_fits_and_say_what_would(session: Session) -> None:
    per_block = 2 * 2 * 2 * 8 * 16 * 4
    assert choose_num_blocks(session.config, free=per_block * 12) == (10,)
    with pytest.raises(ConfigError, match=r"for the KV cache of one sequence of 64 tokens.*max_seq_len 32"):
        choose_num_blocks(session.config, free=per_block * 5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kv_blocks": 0}, "kv_blocks must be at least 1, not 0"),
        ({"kv_blocks": (4, 4)}, "kv_blocks has 2 numbers, and the engine has 1 KV groups"),
        ({"threads": -1}, "threads must be 0"),
        ({"runner": "gpu"}, "unknown runner 'gpu'"),
    ],
)
def test_bad_arguments_are_refused(tiny_engine: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Session(tiny_engine, **arguments)


def test_more_threads_than_cores_are_warned_of(tiny_engine: Path) -> None:
    with (
        pytest.warns(UserWarning, match="99 threads on"),
        Session(tiny_engine, threads=99, kv_blocks=8, runner="reference"),
    ):
        pass


def test_without_native_kernels_auto_warns_and_native_refuses(
    tiny_engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_runner, "unavailable", lambda plan: "no library")
    with pytest.warns(UserWarning, match=r"cannot run here \(no library\).*many times slower"):
        Session(tiny_engine, kv_blocks=8).close()
    with pytest.raises(EngineError, match="cannot run here: no library; use runner='reference'"):
        Session(tiny_engine, kv_blocks=8, runner="native")


def test_a_closed_session_says_so(tiny_engine: Path) -> None:
    session = Session(tiny_engine, kv_blocks=BLOCKS, runner="reference")
    session.close()
    session.close()
    with pytest.raises(PeltonError, match="the session is closed"):
        session.run(good(session))


RUN_WITHOUT_TORCH = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ImportError("torch is blocked")

sys.meta_path.insert(0, Blocker())
import numpy as np
from pelton import Session
from pelton.engine.batch import AttentionMetadata, InputBatch

def i32(*values):
    return np.array(values, np.int32)

table = np.zeros((1, 8), np.int32)
table[0, 0] = 3
group = AttentionMetadata(
    slot_mapping_T=i32(24, 25, 26), block_table_BM=table, cu_seqlens=i32(0, 3), seq_lens_B=i32(3)
)
batch = InputBatch(
    input_ids_T=i32(5, 6, 7), positions_T=i32(0, 1, 2), groups=(group,), logits_indices_N=i32(2)
)
with Session(sys.argv[1], kv_blocks=8, runner="native", threads=1) as session:
    print(int(session.run(batch).logits_NV.argmax()))
"""


@pytest.mark.skipif(not native.available(), reason="the native library is not built")
def test_an_engine_runs_where_torch_cannot_be_imported(tiny_engine: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", RUN_WITHOUT_TORCH, str(tiny_engine)], check=True, stdout=subprocess.PIPE
    )
    table = np.array([3], np.int32)
    piece = Piece(tokens=np.array([5, 6, 7], np.int32), start=0, blocks=table)
    with Session(tiny_engine, kv_blocks=8, runner="reference") as session:
        logits = session.run(make_batch([piece], session.config, logits=[2])).logits_NV
        assert int(result.stdout) == int(logits.argmax())


def test_engine_modules_import_without_torch() -> None:
    names = [m.name for m in pkgutil.iter_modules(pelton.engine.__path__, "pelton.engine.")]
    code = f"import sys, {', '.join(names)}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.skipif(not native.available(), reason="the native library is not built")
def test_auto_takes_the_native_runner(tiny_engine: Path) -> None:
    with Session(tiny_engine, kv_blocks=8) as session:
        assert session.runner_name == "native"
