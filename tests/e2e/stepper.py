"""Drives a session by hand, without the runtime: packs tokens of several sequences into steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pelton.engine.batch import AttentionMetadata, InputBatch, ModelSession


class Stepper:
    """Sequences with blocks shuffled over each KV group's pool; nothing is ever freed."""

    def __init__(self, session: ModelSession, seed: int = 0) -> None:
        build = session.config.build
        assert build.block_size and build.max_seq_len
        self.session = session
        self.block_size = build.block_size
        self.columns = -(-build.max_seq_len // build.block_size)
        rng = np.random.default_rng(seed)
        self._free = [list(rng.permutation(n)) for n in session.num_blocks]
        self._tables: dict[tuple[int, int], list[int]] = {}
        self._tokens: dict[int, list[int]] = {}

    def step(self, new: Mapping[int, Sequence[int]], rows: str = "last") -> dict[int, np.ndarray]:
        """Append ``new`` tokens to each sequence; logits (len, vocab) of its ``last`` or ``all`` rows."""
        positions, ends, lens = [], [], []
        for s, ids in new.items():
            known = self._tokens.setdefault(s, [])
            positions.append(np.arange(len(known), len(known) + len(ids)))
            known.extend(ids)
            ends.append(len(ids))
            lens.append(len(known))
        cu = np.concatenate([[0], np.cumsum(ends)]).astype(np.int32)
        wanted = np.arange(cu[-1]) if rows == "all" else cu[1:] - 1
        batch = InputBatch(
            input_ids_T=np.array([t for ids in new.values() for t in ids], np.int32),
            positions_T=np.concatenate(positions).astype(np.int32),
            groups=tuple(self._group(g, list(new), positions, cu, lens) for g in range(len(self._free))),
            logits_indices_N=wanted.astype(np.int32),
        )
        logits = self.session.run(batch).logits_NV.copy()
        if rows == "all":
            return {s: logits[cu[i] : cu[i + 1]] for i, s in enumerate(new)}
        return {s: logits[i : i + 1] for i, s in enumerate(new)}

    def _group(
        self, g: int, sequences: list[int], positions: list[np.ndarray], cu: np.ndarray, lens: list[int]
    ) -> AttentionMetadata:
        table = np.zeros((len(sequences), self.columns), np.int32)
        slots = []
        for b, (s, p) in enumerate(zip(sequences, positions, strict=True)):
            blocks = self._tables.setdefault((g, s), [])
            while len(blocks) * self.block_size < lens[b]:
                blocks.append(int(self._free[g].pop()))
            table[b, : len(blocks)] = blocks
            slots.append(table[b, p // self.block_size] * self.block_size + p % self.block_size)
        return AttentionMetadata(
            slot_mapping_T=np.concatenate(slots).astype(np.int32),
            block_table_BM=table,
            cu_seqlens=cu,
            seq_lens_B=np.array(lens, np.int32),
        )


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """Largest difference over the largest magnitude."""
    return float(np.abs(got - want).max() / np.abs(want).max())
