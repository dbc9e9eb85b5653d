"""What the host tells a GPU of masks, bias, penalties and log-probabilities: kernels played in numpy."""

from __future__ import annotations

import ctypes as C
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from pelton.engine.batch import AttentionMetadata, InputBatch
from pelton.engine.batch_sampling import LogitsEdits, SamplingInputs
from pelton.engine.cuda.runner import network_logits
from pelton.engine.session import Session
from pelton.kernels.gpu.null import NullLibrary, null_gpu
from pelton.kernels.sampling import reference
from pelton.kernels.sampling.cuda import LIST_ROOM, LOGITS_KINDS, MOST_LOGPROBS, mask_words
from pelton.runtime.logits import LogitsProcessor
from pelton.runtime.sequence import Sequence
from tests.builder.paper_gpu import build_paper_engine
from tests.kernels.edit_cases import PARAMETERS, sequence_of

VOCAB = 300
SEATS = 8


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_paper_engine(tmp_path_factory.mktemp("gpu") / "paper.engine", max_batch_size=SEATS)


def array(address: int, dtype: Any, *shape: int) -> Any:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.ctypeslib.as_array((C.c_ubyte * size).from_address(address)).view(dtype).reshape(shape)


class Player:
    """The bodies of the kernels, on memory that is the host's."""

    def __init__(self) -> None:
        self.gpu: NullLibrary | None = None

    def bodies(self) -> dict[str, Any]:
        names = ("mark", "keep", "bias", "edit", "scan", "count", "logprobs")
        return {name: self._body(getattr(self, name)) for name in names}

    def _body(self, play: Any) -> Any:
        def body(parameters: Any) -> None:
            play(*(C.c_uint64.from_address(p).value for p in parameters))

        return body

    @property
    def rows(self) -> int:
        assert self.gpu is not None
        return int(self.gpu.grid[0])

    def mark(self, counts: int, pairs: int, n: int, sampled: int, unknown: int, *_: int) -> None:
        n, unknown = n & 0xFFFFFFFF, C.c_int32(unknown & 0xFFFFFFFF).value
        row, entries = array(counts, np.uint16, VOCAB), array(pairs, np.int32, n, 2)
        assert not row.any()
        row[entries[:, 0]] = entries[:, 1]
        if unknown:
            row[array(sampled, np.int32, SEATS)[-1 - unknown]] += 1

    def keep(self, logits: int, seat: int, wanted: int, kept: int, *_: int) -> None:
        n = self.rows
        chosen = (array(seat, np.int32, n) >= 0) & (array(wanted, np.int32, n) >= 0)
        array(kept, np.float32, n, VOCAB)[chosen] = array(logits, np.float32, n, VOCAB)[chosen]

    def bias(self, logits: int, seat: int, short: int, ids: int, values: int, lengths: int, *_: int) -> None:
        rows = array(logits, np.float32, self.rows, VOCAB)
        for n, s in enumerate(array(seat, np.int32, self.rows).tolist()):
            if s >= 0:
                always, ends = array(lengths, np.int32, SEATS, 2)[s].tolist()
                tokens = array(ids, np.int32, SEATS, LIST_ROOM)[s]
                rows[n, tokens[:always]] += array(values, np.float32, SEATS, LIST_ROOM)[s, :always]
                if array(short, np.int32, self.rows)[n]:
                    rows[n, tokens[always : always + ends]] = -np.inf

    def edit(self, logits: int, seat: int, masked: int, *rest: int) -> None:
        n = self.rows
        again, often, once = (array(a, np.float32, n) for a in rest[:3])
        counts = array(rest[3], np.uint16, SEATS, VOCAB)
        words = array(rest[4], np.uint8, SEATS, 4 * mask_words(VOCAB))
        rows = array(logits, np.float32, n, VOCAB)
        for i, s in enumerate(array(seat, np.int32, n).tolist()):
            if s < 0:
                continue
            if (again[i], often[i], once[i]) != (1, 0, 0):
                seen, times = counts[s] > 0, (counts[s] & 0x7FFF).astype(np.float32)
                penalised = np.where(rows[i] > 0, rows[i] / again[i], rows[i] * again[i])
                rows[i] = np.where(seen, penalised, rows[i]) - often[i] * times - once[i] * (times > 0)
            if array(masked, np.int32, n)[i]:
                rows[i, np.unpackbits(words[s], bitorder="little")[:VOCAB] == 0] = -np.inf

    def scan(self, logits: int, *rest: int) -> None:
        assert self.gpu is not None
        rows = int(self.gpu.grid[1])
        tokens = array(logits, np.float32, rows, VOCAB).argmax(axis=1)
        for address in rest[8:10]:
            array(address, np.int32, rows)[:] = tokens

    def count(self, seat: int, tokens: int, counts: int, *_: int) -> None:
        for s, token in zip(
            array(seat, np.int32, self.rows), array(tokens, np.int32, self.rows), strict=True
        ):
            if s >= 0:
                array(counts, np.uint16, SEATS, VOCAB)[s, token] += 1

    def logprobs(self, logits: int, kept: int, seat: int, wanted: int, tokens: int, *outs: int) -> None:
        n = self.rows
        raw, edited = array(logits, np.float32, n, VOCAB).copy(), array(seat, np.int32, n) >= 0
        if edited.any():
            raw[edited] = array(kept, np.float32, n, VOCAB)[edited]
        chosen, ranks, ids, values = reference.log_softmax_topk(
            raw, array(tokens, np.int32, n), MOST_LOGPROBS
        )
        found = array(outs[0], np.float32, n, 1 + MOST_LOGPROBS)
        found[:, 0], found[:, 1:] = chosen, values
        array(outs[1], np.int32, n)[:] = ranks
        array(outs[2], np.int32, n, MOST_LOGPROBS)[:] = ids


@pytest.fixture
def player() -> Iterator[Player]:
    player = Player()
    with null_gpu(player.bodies()) as player.gpu:
        yield player


def batch(n: int) -> InputBatch:
    cu = np.arange(n + 1, dtype=np.int32)
    group = AttentionMetadata(
        slot_mapping_T=cu[:n] * 16,
        block_table_BM=np.zeros((n, 8), np.int32),
        cu_seqlens=cu,
        seq_lens_B=np.full(n, 3, np.int32),
    )
    return InputBatch(
        input_ids_T=np.ones(n, np.int32),
        positions_T=np.full(n, 2, np.int32),
        groups=(group,),
        logits_indices_N=cu[:n],
    )


def inputs(sequences: list[Sequence], begin: list[Sequence], wanted: list[int] | None) -> SamplingInputs:
    params, n = [q.request.sampling for q in sequences], len(sequences)
    edited = [LogitsProcessor(q).edits for q in sequences]
    short = [q.num_output_tokens < p.min_tokens for q, p in zip(sequences, params, strict=True)]
    zeros = np.zeros(n, np.float32)
    edits = LogitsEdits(
        begins=[LogitsProcessor(q).device_edits(q) for q in begin],
        seat_N=np.array([q.seat if e else -1 for q, e in zip(sequences, edited, strict=True)], np.int32),
        masked_N=np.array([p.allowed_token_ids is not None for p in params], np.int32),
        short_N=np.array(short, np.int32),
        repetition_N=np.array([p.repetition_penalty for p in params], np.float32),
        frequency_N=np.array([p.frequency_penalty for p in params], np.float32),
        presence_N=np.array([p.presence_penalty for p in params], np.float32),
    )
    return SamplingInputs(
        temperature_N=zeros,
        top_k_N=np.zeros(n, np.int32),
        top_p_N=zeros + 1,
        min_p_N=zeros,
        uniform_N=zeros,
        edits=edits if any(edited) else None,
        logprobs_N=None if wanted is None else np.array(wanted, np.int32),
    )


def test_the_device_is_told_what_the_host_would_do(engine: Path, player: Player) -> None:
    """Two steps in flight, seats in another order than rows, one sequence that begins with a token that the
    step before samples."""
    rng, seats = np.random.default_rng(0), [5, 0, 7, 2, 1, 6, 3]
    sequences = [sequence_of(VOCAB, s, p) for s, p in zip(seats, PARAMETERS, strict=True)]
    with Session(engine, kv_blocks=100, trust=True) as session:
        runner: Any = session._runner
        logits = array(runner._logits_address, np.float32, len(seats), VOCAB)
        pending: list[Any] = []
        expected: list[np.ndarray] = []
        raws: list[np.ndarray] = []
        for step in range(3):
            raw = (rng.standard_normal(logits.shape) * 3).astype(np.float32)
            logits[:] = raw
            wanted = [2, -1, 0, -1, 5, 3, -1] if step != 1 else None
            begin = {0: sequences[1:], 1: [], 2: []}[step]
            if step == 1:  # of the first, nothing is known yet but that a token comes
                sequences[0].expect(-1)
                begin = [sequences[0]]
            members = sequences if step else sequences[1:]
            if step == 0:
                logits[: len(members)] = raw[1:]
            given = inputs(members, begin, wanted[-len(members) :] if wanted else None)
            pending.append(session.submit(batch(len(members)), given))
            if step == 1:
                sequences[0].reveal(int(pending[0].tokens()[0]))
            want = []
            for row, q in zip(raw[-len(members) :], members, strict=True):
                mine = row.copy()
                LogitsProcessor(q).apply(mine, q)
                want.append(int(mine.argmax()))
            expected.append(np.array(want))
            raws.append(raw[-len(members) :])
            for q, token in zip(members, want, strict=True):
                q.append(token)
        for step in (1, 2):  # the third step took the first one's slot
            np.testing.assert_array_equal(pending[step].tokens(), expected[step], err_msg=str(step))
        assert pending[1].logprobs() is None
        found = pending[2].logprobs()
        assert found is not None
        scored = np.array(wanted) >= 0
        want_all = reference.log_softmax_topk(raws[2], expected[2], MOST_LOGPROBS)
        got_all = found.chosen_N, found.ranks_N, found.token_ids_Nk, found.logprobs_Nk
        for got, right in zip(got_all, want_all, strict=True):
            np.testing.assert_array_equal(got[scored], right[scored])


def test_nothing_is_made_for_requests_without_edits(engine: Path, player: Player) -> None:
    with Session(engine, kv_blocks=100, trust=True) as session:
        plain = [sequence_of(VOCAB, s, {}) for s in (0, 1)]
        session.submit(batch(2), inputs(plain, [], None)).tokens()
        runner: Any = session._runner
        assert not runner._sampler.edits._tables
        assert runner._sampler.edits._kept is None


def test_logits_become_float32_only_where_somebody_reads_them_as_such(engine: Path) -> None:
    """Sampling reads what the network computes; edits, log-probabilities and the host read float32."""
    ran: list[tuple[str, int]] = []

    def body(name: str) -> Any:
        def note(parameters: Any) -> None:
            logits, kind = C.c_uint64.from_address(parameters[0]), C.c_int32.from_address(parameters[1])
            ran.append((name, kind.value if name == "scan" else 0))
            if name == "scan":
                addresses.append(logits.value)

        return note

    addresses: list[int] = []
    gpu = null_gpu({"pointwise": body("to_float32"), "scan": body("scan")})
    with gpu, Session(engine, kv_blocks=100, trust=True) as session:
        runner: Any = session._runner
        network = network_logits(runner._plan)
        assert network is not None
        members = [sequence_of(VOCAB, s, {}) for s in (0, 1)]
        session.submit(batch(2), inputs(members, [], None)).tokens()
        assert ran == [("scan", LOGITS_KINDS["bfloat16"])]
        session.submit(batch(2), inputs(members, [], [0, -1])).tokens()
        assert ran[1:] == [("to_float32", 0), ("scan", LOGITS_KINDS["float32"])]
        assert addresses == [runner._address(network), runner._logits_address]
        session.run(batch(2))
        assert ran[3:] == [("to_float32", 0)]
