"""A session without a model, whose answers betray every scheduling or paging error.

``FakeSession`` keeps, per layer and slot, what a token stamped there when it was computed: its position,
its token, and a *chain*: a hash of the whole prefix up to it. A step first writes its tokens' stamps at
the slots it was told, then reads back, through the block tables, every earlier position that each query
sees, and checks that it holds that position and continues the same chain. The logits of a row are a
hash of the chain, so a wrong token anywhere before changes the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pelton.engine.batch import InputBatch, StepResult
from pelton.engine.batch_sampling import (
    ALL_EXCLUDED,
    NOT_FINITE,
    LogitsEdits,
    SamplingInputs,
    SequenceEdits,
    StepLogprobs,
)
from pelton.engine.config import BuildConfig, EngineConfig, KVGroup, MemoryPlan, ModelConfig
from pelton.kernels.sampling import reference

MASK = (1 << 64) - 1
ROOT = 0x9E3779B97F4A7C15
POISON = -77


def mix(x: int) -> int:
    """The finaliser of splitmix64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def next_chain(chain: int, token: int) -> int:
    return mix((chain * 31 + token + 1) & MASK)


def chain_logits(chain: int, vocab_size: int, spread: float = 6.0) -> np.ndarray[Any, Any]:
    """(vocab_size,) float32 in [0, spread), no two equal in practice."""
    with np.errstate(over="ignore"):
        x = np.uint64(chain) + np.arange(1, vocab_size + 1, dtype=np.uint64) * np.uint64(ROOT)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return (x >> np.uint64(40)).astype(np.float32) * np.float32(spread / 2**24)


def fake_config(
    *,
    windows: Sequence[int] = (0,),
    vocab_size: int = 50,
    block_size: int = 4,
    max_batch_size: int = 8,
    max_seq_len: int = 64,
    max_num_tokens: int = 16,
    max_input_len: int | None = None,
    eos_token_ids: tuple[int, ...] = (),
) -> EngineConfig:
    """A resolved engine config; group g has layer g alone."""
    return EngineConfig(
        model=ModelConfig(
            architecture="FakeForCausalLM",
            name="fake",
            vocab_size=vocab_size,
            hidden_size=8,
            num_layers=len(windows),
            num_parameters=0,
            max_position_embeddings=max_seq_len,
            kv_groups=tuple(
                KVGroup(layers=(g,), num_kv_heads=1, head_dim=4, window=window)
                for g, window in enumerate(windows)
            ),
            eos_token_ids=eos_token_ids,
        ),
        build=BuildConfig(
            max_batch_size=max_batch_size,
            max_seq_len=max_seq_len,
            max_num_tokens=max_num_tokens,
            max_input_len=max_input_len or max_seq_len - 1,
            block_size=block_size,
            dtype="float32",
            activations="float32",
            kv_dtype="float32",
            fast_build=False,
            quant="none",
            profiling="names",
            threads=1,
            profiles=(),
            opt_num_tokens=1,
            timing=False,
            target="cpu",
            model_impl="pelton",
            gpu_memory_fraction=0.9,
            deterministic=False,
            accumulate="float32",
            cpu_level="any",
        ),
        memory=MemoryPlan(weights=0, arena=0, workspace=0, kv_bytes_per_token=0),
    )


class FakeSession:
    """A ``ModelSession``. ``before_run(batch)`` may raise; ``edit_logits(batch, logits_NV)`` may change."""

    def __init__(
        self,
        config: EngineConfig | None = None,
        num_blocks: int | Sequence[int] = 32,
        *,
        before_run: Callable[[InputBatch], None] | None = None,
        edit_logits: Callable[[InputBatch, np.ndarray[Any, Any]], None] | None = None,
    ) -> None:
        self.config = config or fake_config()
        self.groups = self.config.model.kv_groups
        self.num_blocks = (
            (num_blocks,) * len(self.groups) if isinstance(num_blocks, int) else tuple(num_blocks)
        )
        assert self.config.build.block_size
        self.block_size = self.config.build.block_size
        self.before_run = before_run
        self.edit_logits = edit_logits
        self.num_runs = 0
        self.closed = False
        self._positions = [np.full(n * self.block_size, -1, np.int64) for n in self.num_blocks]
        self._tokens = [np.full(n * self.block_size, -1, np.int64) for n in self.num_blocks]
        self._chains: list[list[int | None]] = [[None] * (n * self.block_size) for n in self.num_blocks]

    def poison_blocks(self, group: int, blocks: Sequence[int]) -> None:
        """The executor's hook: the content of these blocks is meaningless from now on."""
        for block in blocks:
            slots = slice(block * self.block_size, (block + 1) * self.block_size)
            self._positions[group][slots] = POISON
            self._tokens[group][slots] = POISON
            self._chains[group][slots] = [None] * self.block_size

    def run(self, batch: InputBatch, outputs: Sequence[str] = ()) -> StepResult:
        assert not outputs
        self._check_contract(batch)
        self.num_runs += 1
        if self.before_run is not None:
            self.before_run(batch)
        cu = batch.groups[0].cu_seqlens.tolist()
        chains = [0] * len(batch.input_ids_T)
        for b in range(len(cu) - 1):
            if cu[b + 1] > cu[b]:
                self._run_sequence(batch, b, cu[b], cu[b + 1], chains)
        vocab_size = self.config.model.vocab_size
        logits = np.empty((len(batch.logits_indices_N), vocab_size), np.float32)
        for n, row in enumerate(batch.logits_indices_N.tolist()):
            logits[n] = chain_logits(chains[row], vocab_size)
        if self.edit_logits is not None:
            self.edit_logits(batch, logits)
        logits.flags.writeable = False
        return StepResult(logits_NV=logits, outputs={})

    def close(self) -> None:
        self.closed = True

    def _check_contract(self, batch: InputBatch) -> None:
        build = self.config.build
        assert build.max_num_tokens and build.max_batch_size and build.max_seq_len
        num_tokens = len(batch.input_ids_T)
        assert 1 <= num_tokens <= build.max_num_tokens
        assert len(batch.groups) == len(self.groups)
        assert len(batch.logits_indices_N) <= build.max_batch_size
        assert (np.diff(batch.logits_indices_N) > 0).all()
        columns = -(-build.max_seq_len // self.block_size)
        for g, meta in enumerate(batch.groups):
            num_seqs = len(meta.seq_lens_B)
            assert 1 <= num_seqs <= build.max_batch_size
            assert meta.block_table_BM.shape == (num_seqs, columns)
            assert meta.cu_seqlens[0] == 0
            assert meta.cu_seqlens[-1] == num_tokens == len(meta.slot_mapping_T)
            for array in (meta.slot_mapping_T, meta.block_table_BM, meta.cu_seqlens, meta.seq_lens_B):
                assert array.dtype == np.int32
                assert array.flags.c_contiguous
            written = meta.slot_mapping_T[meta.slot_mapping_T >= 0]
            assert len(np.unique(written)) == len(written), "two tokens of a step share a slot"
            assert (meta.block_table_BM < self.num_blocks[g]).all()
        assert batch.input_ids_T.dtype == batch.positions_T.dtype == batch.logits_indices_N.dtype == np.int32

    def _run_sequence(self, batch: InputBatch, b: int, start: int, stop: int, chains: list[int]) -> None:
        tokens = batch.input_ids_T[start:stop].tolist()
        positions = batch.positions_T[start:stop].tolist()
        seq_len = int(batch.groups[0].seq_lens_B[b])
        assert positions == list(range(seq_len - (stop - start), seq_len)), "positions are not the last"
        before = self._chain_before(batch, b, positions[0])
        for i, token in enumerate(tokens):
            before = chains[start + i] = next_chain(before, token)
        for g in range(len(self.groups)):
            self._write(batch, g, b, start, tokens, positions, chains)
        for g, group in enumerate(self.groups):
            self._verify(batch, g, b, positions, group.window)

    def _slot(self, batch: InputBatch, g: int, b: int, position: int) -> int:
        block = int(batch.groups[g].block_table_BM[b, position // self.block_size])
        return block * self.block_size + position % self.block_size

    def _chain_before(self, batch: InputBatch, b: int, position: int) -> int:
        if position == 0:
            return ROOT
        found = set()
        for g, group in enumerate(self.groups):
            if group.window != 1:  # such a group does not see the token before
                slot = self._slot(batch, g, b, position - 1)
                assert self._positions[g][slot] == position - 1, f"group {g} lacks position {position - 1}"
                found.add(self._chains[g][slot])
        assert len(found) == 1, "groups disagree about the prefix"
        chain = found.pop()
        assert chain is not None
        return chain

    def _write(
        self,
        batch: InputBatch,
        g: int,
        b: int,
        start: int,
        tokens: list[int],
        positions: list[int],
        chains: list[int],
    ) -> None:
        for i, (token, position) in enumerate(zip(tokens, positions, strict=True)):
            slot = int(batch.groups[g].slot_mapping_T[start + i])
            expected = self._slot(batch, g, b, position)
            if slot == -1:  # already there: it must be what would have been written
                stamp = (self._positions[g][expected], self._tokens[g][expected], self._chains[g][expected])
                assert stamp == (position, token, chains[start + i]), "a shared slot holds something else"
                continue
            assert self._positions[g][slot] in (-1, POISON), f"group {g}: slot {slot} is written twice"
            assert slot == expected, f"group {g}: token at {position} goes to slot {slot}, not {expected}"
            self._positions[g][slot] = position
            self._tokens[g][slot] = token
            self._chains[g][slot] = chains[start + i]

    def _verify(self, batch: InputBatch, g: int, b: int, positions: list[int], window: int) -> None:
        first = max(0, positions[0] - window + 1) if window else 0
        chain: int | None = ROOT if first == 0 else None
        for position in range(first, positions[-1] + 1):
            slot = self._slot(batch, g, b, position)
            assert self._positions[g][slot] == position, (
                f"group {g} holds position {self._positions[g][slot]} where {position} belongs"
            )
            stored = self._chains[g][slot]
            if chain is not None:
                assert stored == next_chain(chain, int(self._tokens[g][slot])), "the prefix is another's"
            chain = stored


def reference_answer(
    prompt: Sequence[int], num_tokens: int, vocab_size: int = 50, pick: Callable[..., int] | None = None
) -> list[int]:
    """What a request alone must give: greedy, or ``pick(logits_V, position)``."""
    chain, answer, length = ROOT, [], len(prompt)
    for token in prompt:
        chain = next_chain(chain, token)
    for _ in range(num_tokens):
        logits = chain_logits(chain, vocab_size)
        token = int(logits.argmax()) if pick is None else pick(logits, length)
        answer.append(token)
        chain, length = next_chain(chain, token), length + 1
    return answer


class SubmittingSession(FakeSession):
    """Samples by itself, as a GPU's session does: tokens are had only from what ``submit`` returns."""

    samples = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sampled = np.zeros(0, np.int32)
        self.edits = FakeEdits()
        self.in_flight = self.num_submits = self.num_next = 0
        """``num_next``: steps that were not the first of their run."""
        self._last: InputBatch | None = None

    def submit(self, batch: InputBatch, sampling: SamplingInputs) -> FakePending:
        assert self.in_flight < 2, "three steps in flight"
        self.num_submits += 1
        self._check_run(batch)
        ids = batch.input_ids_T
        waits = ids < 0
        resolved = np.where(waits, self._sampled[np.where(waits, -1 - ids, 0)] if waits.any() else 0, ids)
        resolved = np.maximum(resolved, 0)  # of a row without a token: nobody reads what comes of it
        logits_NV = self.run(replace(batch, input_ids_T=resolved.astype(np.int32))).logits_NV
        assert len(logits_NV) == len(sampling.temperature_N)
        raw_NV, logits_NV = logits_NV, logits_NV.copy()
        if sampling.edits is not None:
            self.edits.apply(logits_NV, sampling.edits, self._sampled)
        self._sampled = np.array([self._draw(row, sampling, n) for n, row in enumerate(logits_NV)], np.int32)
        if sampling.edits is not None:
            self.edits.count(sampling.edits, self._sampled)
        self.in_flight += 1
        return FakePending(self, self._sampled, raw_NV, sampling.logprobs_N)

    def _check_run(self, batch: InputBatch) -> None:
        """A run's next step is the one before, one token on (``DecodeRun``)."""
        tables = [replace(g, block_table_BM=g.block_table_BM.copy()) for g in batch.groups]
        last, self._last = self._last, replace(batch, groups=tuple(tables))
        if last is None or batch.run is None or batch.run is not last.run:
            return
        self.num_next += 1
        assert self.in_flight == 1, "the step before must be in flight"
        assert batch.input_ids_T.tolist() == [-1 - b for b in range(len(last.positions_T))]
        assert (batch.positions_T == last.positions_T + 1).all()
        assert batch.logits_indices_N is last.logits_indices_N
        begins_B = batch.positions_T % self.block_size == 0
        for meta, before, group in zip(batch.groups, last.groups, self.groups, strict=True):
            assert meta.cu_seqlens is before.cu_seqlens
            assert (meta.seq_lens_B == batch.positions_T + 1).all()
            assert (meta.slot_mapping_T >= 0).all()
            new = meta.block_table_BM != before.block_table_BM
            new[begins_B, batch.positions_T[begins_B] // self.block_size] = False
            for b, position in enumerate(batch.positions_T.tolist() if group.window else ()):
                new[b, : max(0, position - group.window + 1) // self.block_size] = False  # it is not read
            assert not new.any(), "a block that the step before did not have"

    @staticmethod
    def _draw(logits_V: np.ndarray[Any, Any], sampling: SamplingInputs, n: int) -> int:
        top = logits_V.max()
        if not np.isfinite(top):
            return ALL_EXCLUDED if top == -np.inf else NOT_FINITE
        t = sampling.temperature_N[n]
        if t == 0:
            return int(logits_V.argmax())
        limits = int(sampling.top_k_N[n]), float(sampling.top_p_N[n]), float(sampling.min_p_N[n])
        return reference._choose(logits_V, t, *limits, float(sampling.uniform_N[n]))


class FakeEdits:
    """What a device keeps of edited sequences, by seat, and does to their logits."""

    def __init__(self) -> None:
        self._states: dict[int, SequenceEdits] = {}
        self._counts: dict[int, dict[int, int]] = {}

    def apply(
        self, logits_NV: np.ndarray[Any, Any], edits: LogitsEdits, before: np.ndarray[Any, Any]
    ) -> None:
        for state in edits.begins:
            counts = dict(zip(state.token_ids.tolist(), state.counts.tolist(), strict=True))
            if state.unknown:
                token = int(before[-1 - state.unknown])
                counts[token] = counts.get(token, 0) + 1
            self._states[state.seat], self._counts[state.seat] = state, counts
        for n, seat in enumerate(edits.seat_N.tolist()):
            if seat >= 0:
                self._edit(logits_NV[n], n, edits, self._states[seat], self._counts[seat])

    @staticmethod
    def _edit(
        row_V: np.ndarray[Any, Any], n: int, edits: LogitsEdits, state: SequenceEdits, counts: dict[int, int]
    ) -> None:
        row_V[state.bias_ids] += state.bias
        if edits.short_N[n]:
            row_V[state.end_ids] = -np.inf
        again, often, once = edits.repetition_N[n], edits.frequency_N[n], edits.presence_N[n]
        for token, number in counts.items():
            x, times = row_V[token], np.float32(number & 0x7FFF)
            x = x / again if x > 0 else x * again
            row_V[token] = x - often * times - once * np.float32(times > 0)
        if edits.masked_N[n]:
            assert state.allowed_ids is not None
            banned = np.ones(len(row_V), bool)
            banned[state.allowed_ids] = False
            row_V[banned] = -np.inf

    def count(self, edits: LogitsEdits, tokens: np.ndarray[Any, Any]) -> None:
        for seat, token in zip(edits.seat_N.tolist(), tokens.tolist(), strict=True):
            if seat >= 0 and token >= 0:
                counts = self._counts[seat]
                counts[token] = counts.get(token, 0) + 1


class FakePending:
    def __init__(
        self,
        session: SubmittingSession,
        tokens: np.ndarray[Any, Any],
        raw_NV: np.ndarray[Any, Any] | None = None,
        wanted_N: np.ndarray[Any, Any] | None = None,
    ) -> None:
        self._session, self._tokens, self._taken = session, tokens, False
        self._raw_NV, self._wanted_N = raw_NV, wanted_N

    def tokens(self) -> np.ndarray[Any, Any]:
        if not self._taken:
            self._taken = True
            self._session.in_flight -= 1
        return self._tokens

    def logprobs(self) -> StepLogprobs | None:
        assert self._taken
        if self._wanted_N is None:
            return None
        assert self._raw_NV is not None
        most = min(20, self._raw_NV.shape[1])
        chosen, ranks, ids, values = reference.log_softmax_topk(
            self._raw_NV, np.maximum(self._tokens, 0), most
        )
        return StepLogprobs(chosen_N=chosen, ranks_N=ranks, token_ids_Nk=ids, logprobs_Nk=values)
