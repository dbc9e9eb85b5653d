"""Steps over a session of a GPU engine, as its executor submits them. Imports no torch: start is measured."""

from __future__ import annotations

import statistics
import time

import numpy as np

import pelton
from pelton.engine.batch import AttentionMetadata, InputBatch
from pelton.engine.batch_sampling import SamplingInputs


class Driver:
    """Steps over a session: sequence ``b`` owns the blocks from ``b * per_sequence``."""

    def __init__(self, session: pelton.Session) -> None:
        build = session.config.build
        assert build.block_size and build.max_seq_len
        self.session, self._page = session, build.block_size
        self._columns = -(-build.max_seq_len // build.block_size)
        self._rng = np.random.default_rng(1)

    def batch(self, new: int, totals: list[int], per_sequence: int) -> InputBatch:
        """``new`` tokens of each sequence, which then has ``totals[b]``."""
        table = np.zeros((len(totals), self._columns), np.int32)
        positions, slots = [], []
        for b, total in enumerate(totals):
            table[b, :per_sequence] = np.arange(per_sequence) + b * per_sequence
            p = np.arange(total - new, total)
            positions.append(p)
            slots.append(table[b, p // self._page] * self._page + p % self._page)
        cu = np.arange(len(totals) + 1, dtype=np.int32) * new
        group = AttentionMetadata(
            slot_mapping_T=np.concatenate(slots).astype(np.int32),
            block_table_BM=table,
            cu_seqlens=cu,
            seq_lens_B=np.array(totals, np.int32),
        )
        return InputBatch(
            input_ids_T=self._rng.integers(3, 100000, new * len(totals)).astype(np.int32),
            positions_T=np.concatenate(positions).astype(np.int32),
            groups=(group,),
            logits_indices_N=cu[1:] - 1,
        )

    def milliseconds(self, batch: InputBatch, repeats: int) -> float:
        """Median of whole steps after two that warm up."""
        times = []
        for i in range(repeats + 2):
            start = time.perf_counter()
            self.session.submit(batch, greedy(batch)).tokens()
            if i >= 2:
                times.append(1e3 * (time.perf_counter() - start))
        return statistics.median(times)

    def decode(self, prompt: int, answer: int) -> float:
        """Milliseconds per token of one greedy answer, after a prompt."""
        per = -(-(prompt + answer) // self._page)
        steps = [self.batch(prompt, [prompt], per)]
        steps += [self.batch(1, [prompt + i], per) for i in range(1, answer + 1)]
        pending = self.session.submit(steps[0], greedy(steps[0]))
        token, start = int(pending.tokens()[0]), time.perf_counter()
        for step in steps[1:]:
            step.input_ids_T[0] = token
            token = int(self.session.submit(step, greedy(step)).tokens()[0])
        return 1e3 * (time.perf_counter() - start) / answer


def greedy(batch: InputBatch) -> SamplingInputs:
    """The most likely token of each row."""
    n = len(batch.logits_indices_N)
    zeros, ones = np.zeros(n, np.float32), np.ones(n, np.float32)
    return SamplingInputs(
        temperature_N=zeros, top_k_N=np.zeros(n, np.int32), top_p_N=ones, min_p_N=zeros, uniform_N=zeros
    )
