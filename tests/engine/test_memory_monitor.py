"""An engine states its memory before it is loaded, and keeps to it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pelton.engine.artifact import open_engine
from pelton.engine.memory_monitor import kv_bytes
from pelton.engine.resources import available_memory
from pelton.engine.session import Session
from pelton.errors import ConfigError
from pelton.kernels import native

# Fills the whole KV cache with steps of the largest size, then decodes.
WORK = """
import json, sys
import msgspec, numpy as np
from pelton.engine.batch import AttentionMetadata, InputBatch
from pelton.engine.session import Session
session = Session(sys.argv[1], threads=2, kv_blocks=int(sys.argv[2]), runner="native")
session._prefault.wait()
build = session.config.build
size, columns = build.block_size, -(-build.max_seq_len // build.block_size)
length = min(build.max_seq_len, session.num_blocks[0] * size)
def step(start, count, first):
    positions = np.arange(start, start + count, dtype=np.int32)
    blocks = (np.arange(columns, dtype=np.int32) + first) % session.num_blocks[0]
    slots = blocks[positions // size] * size + positions % size
    group = lambda: AttentionMetadata(
        slot_mapping_T=slots.astype(np.int32), block_table_BM=blocks[None].copy(),
        cu_seqlens=np.array([0, count], np.int32), seq_lens_B=np.array([start + count], np.int32))
    batch = InputBatch(input_ids_T=positions % 50, positions_T=positions,
        groups=tuple(group() for _ in session.num_blocks), logits_indices_N=np.array([count - 1], np.int32))
    session.run(batch)
used = 0
while used < session.num_blocks[0]:
    at = 0
    while at < length:
        count = min(build.max_num_tokens, length - at)
        step(at, count, used)
        at += count
    used += columns
use = session.memory
print(json.dumps(msgspec.to_builtins(use) | {"declared": use.declared, "torch": "torch" in sys.modules}))
"""


def measured(engine: Path, kv_blocks: int) -> dict[str, int]:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-c", WORK, str(engine), str(kv_blocks)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    use: dict[str, int] = json.loads(done.stdout)
    assert not use["torch"]
    return use


needs_native = pytest.mark.skipif(not native.available(), reason="no native library")


@needs_native
def test_a_tiny_engine_keeps_its_memory_plan(tiny_engine: Path) -> None:
    use = measured(tiny_engine, 32)
    assert 0 < use["growth"] <= use["declared"]


@needs_native
def test_a_real_engine_keeps_its_memory_plan(smollm2_engine: Path) -> None:
    use = measured(smollm2_engine, 64)
    memory = open_engine(smollm2_engine).config.memory
    assert (use["weights"], use["arena"]) == (memory.weights, memory.arena)
    assert use["kv"] <= use["growth"] <= use["declared"], "the cache is full, so it is at least that"
    assert use["peak_resident"] >= use["growth"] + use["weights"] * 0.9


def test_the_cache_is_declared_by_its_blocks(tiny_engine: Path) -> None:
    config = open_engine(tiny_engine).config
    # 2 layers, keys and values, 2 heads of 16 float16 (float32 where exact).
    per_token = config.memory.kv_bytes_per_token
    assert kv_bytes(config, (5,)) == 5 * 8 * per_token


def test_a_cache_beyond_memory_is_refused_with_what_fits(tiny_engine: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv_blocks 1000000000 need .* TB .*, and .* are free") as e:
        Session(tiny_engine, kv_blocks=10**9)
    fits = int(str(e.value).rpartition("use ")[2].partition(" ")[0])
    config = open_engine(tiny_engine).config
    assert 0.5 * available_memory() < kv_bytes(config, (fits,)) <= 1.5 * available_memory()
