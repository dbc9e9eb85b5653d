"""From a scheduler's decision to the packed tensors of a step. Hot: numpy over whole steps, no loops
over tokens."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt

from pelton.engine.batch import AttentionMetadata, InputBatch
from pelton.runtime.scheduler import ScheduledSequence

Int32 = npt.NDArray[np.int32]


class InputBatchBuilder:
    """Makes an ``InputBatch`` of each step; arrays whose size is known are allocated once."""

    def __init__(self, *, num_groups: int, block_size: int, num_columns: int, max_num_seqs: int) -> None:
        self._num_groups = num_groups
        self._block_size = block_size
        self._tables_GBM: Int32 = np.zeros((num_groups, max_num_seqs, num_columns), np.int32)

    def build(self, scheduled: Seq[ScheduledSequence]) -> InputBatch:
        """Pack ``scheduled`` in order. The block tables are views, valid until the next call.

        Rows of logits come in the same order: each sequence's prompt rows, then its sampled row.
        """
        num_seqs = len(scheduled)
        counts_B = np.fromiter((s.num_new for s in scheduled), np.int32, num_seqs)
        starts_B = np.fromiter((s.num_computed for s in scheduled), np.int32, num_seqs)
        shared_B = np.fromiter((s.sequence.kv.num_shared_tokens for s in scheduled), np.int32, num_seqs)
        cu_seqlens = np.zeros(num_seqs + 1, np.int32)
        np.cumsum(counts_B, out=cu_seqlens[1:])
        rows_T = np.repeat(np.arange(num_seqs, dtype=np.int32), counts_B)
        offsets_B = starts_B - cu_seqlens[:-1]
        positions_T = np.arange(cu_seqlens[-1], dtype=np.int32) + offsets_B[rows_T]
        input_ids_T = np.concatenate(
            [s.sequence.tokens[s.num_computed : s.num_computed + s.num_new] for s in scheduled]
        )
        logits_indices_N = np.fromiter(
            (row for b, s in enumerate(scheduled) for row in _logits_rows(s, int(offsets_B[b]))), np.int32
        )
        seq_lens_B = starts_B + counts_B
        columns_T, places_T = np.divmod(positions_T, np.int32(self._block_size))
        shared_T = positions_T < shared_B[rows_T]
        groups = []
        for g in range(self._num_groups):
            table_BM = self._tables_GBM[g, :num_seqs]
            for b, s in enumerate(scheduled):
                table_BM[b] = s.sequence.kv.tables[g].blocks
            slots_T = table_BM[rows_T, columns_T] * np.int32(self._block_size) + places_T
            # A token found in the prefix cache and computed again only for its logits: its KV is
            # there, perhaps shared with others, and is not written again.
            slots_T[shared_T] = -1
            groups.append(
                AttentionMetadata(
                    slot_mapping_T=slots_T,
                    block_table_BM=table_BM,
                    cu_seqlens=cu_seqlens,
                    seq_lens_B=seq_lens_B,
                )
            )
        return InputBatch(
            input_ids_T=input_ids_T,
            positions_T=positions_T,
            groups=tuple(groups),
            logits_indices_N=logits_indices_N,
        )


def _logits_rows(s: ScheduledSequence, offset: int) -> list[int]:
    """Rows of T of one sequence's logits; ``offset`` is position minus row."""
    rows = list(range(s.first_prompt_row - offset, s.last_prompt_row - offset))
    if s.samples:
        rows.append(s.num_computed + s.num_new - 1 - offset)
    return rows
