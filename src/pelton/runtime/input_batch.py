"""From a scheduler's decision to the packed tensors of a step. Hot: numpy over whole steps, no loops
over tokens or sequences."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pelton.engine.batch import AttentionMetadata, DecodeRun, InputBatch
from pelton.runtime.scheduled import StepArrays
from pelton.runtime.seats import NUM_SHARED, Seats

Int32 = npt.NDArray[np.int32]


class InputBatchBuilder:
    """Makes an ``InputBatch`` of each step; arrays whose size is known are allocated once."""

    def __init__(self, seats: Seats, *, block_size: int, max_num_tokens: int) -> None:
        self._seats = seats
        self._block_size = np.int32(block_size)
        self._tables_GBM = np.zeros_like(seats.tables_GSM)
        self._range: Int32 = np.arange(max(max_num_tokens, len(seats.generation_S)) + 1, dtype=np.int32)
        self._range.flags.writeable = False
        self._placeholders: Int32 = -1 - self._range
        self._placeholders.flags.writeable = False
        self._last: InputBatch | None = None
        """The batch built last, where the run it began can go on."""

    def build_next(self, step: StepArrays) -> InputBatch:
        """As ``build`` where the same everyone decodes as in the step built before, which is in flight."""
        everyone, last = step.everyone, self._last
        assert everyone is not None
        if last is None:
            return self.build(step)
        n, positions_B = len(step.seats_B), step.starts_B
        seq_lens_B = positions_B + np.int32(1)
        rows = (positions_B % self._block_size == 0).nonzero()[0]
        if len(rows):
            seats, columns = step.seats_B[rows], positions_B[rows] // self._block_size
        groups = []
        for g, before in enumerate(last.groups):
            slots_B = before.slot_mapping_T + np.int32(1)
            if len(rows):
                blocks = self._seats.tables_GSM[g, seats, columns]
                slots_B[rows] = blocks * self._block_size
                if not isinstance(everyone.at, slice):  # the table is a copy
                    before.block_table_BM[rows, columns] = blocks
            groups.append(
                AttentionMetadata(
                    slot_mapping_T=slots_B,
                    block_table_BM=before.block_table_BM,
                    cu_seqlens=before.cu_seqlens,
                    seq_lens_B=seq_lens_B,
                )
            )
        self._last = InputBatch(
            input_ids_T=self._placeholders[:n],
            positions_T=positions_B,
            groups=tuple(groups),
            logits_indices_N=last.logits_indices_N,
            run=last.run,
        )
        return self._last

    def build(self, step: StepArrays) -> InputBatch:
        """Pack ``step`` in its order. The block tables are views, valid until the next call.

        Rows of logits come in the same order: each sequence's prompt rows, then its sampled row.
        """
        seats, seats_B, starts_B = self._seats, step.seats_B, step.starts_B
        num_seqs, everyone = len(seats_B), step.everyone
        shared_B = seats.counters_CS[NUM_SHARED, seats_B if everyone is None else everyone.at]
        seq_lens_B = starts_B + step.counts_B
        if everyone is not None or (step.counts_B == 1).all():
            cu_seqlens, positions_T = self._range[: num_seqs + 1], starts_B
            seats_T, shared_T = seats_B, shared_B
        else:
            cu_seqlens = np.zeros(num_seqs + 1, np.int32)
            np.cumsum(step.counts_B, out=cu_seqlens[1:])
            positions_T = self._range[: cu_seqlens[-1]] + np.repeat(starts_B - cu_seqlens[:-1], step.counts_B)
            seats_T, shared_T = np.repeat(seats_B, step.counts_B), np.repeat(shared_B, step.counts_B)
        columns_T, places_T = np.divmod(positions_T, self._block_size)
        is_shared_T = positions_T < shared_T
        any_shared = bool(is_shared_T.any())
        if everyone is not None:
            in_place = isinstance(everyone.at, slice)
        else:
            in_place = bool(seats_B[0] == 0 and (seats_B == self._range[:num_seqs]).all())
        columns = 1 + int(columns_T.max())
        groups = []
        for g, tables_SM in enumerate(seats.tables_GSM):
            slots_T = tables_SM[seats_T, columns_T] * self._block_size + places_T
            # A token found in the prefix cache and computed again only for its logits: its KV is
            # there, perhaps shared with others, and is not written again.
            if any_shared:
                slots_T[is_shared_T] = -1
            table_BM = tables_SM[:num_seqs]
            if not in_place:
                # Of columns behind the longest sequence's the copy has whatever it had: they are not read.
                table_BM = self._tables_GBM[g, :num_seqs]
                np.take(tables_SM[:, :columns], seats_B, axis=0, out=table_BM[:, :columns], mode="clip")
            groups.append(
                AttentionMetadata(
                    slot_mapping_T=slots_T,
                    block_table_BM=table_BM,
                    cu_seqlens=cu_seqlens,
                    seq_lens_B=seq_lens_B,
                )
            )
        goes_on = everyone is not None and not any_shared
        batch = InputBatch(
            input_ids_T=seats.tokens_SL[seats_T, positions_T],
            positions_T=positions_T,
            groups=tuple(groups),
            logits_indices_N=cu_seqlens[:-1] if everyone is not None else _logits_rows(step, cu_seqlens),
            run=DecodeRun() if goes_on else None,
        )
        self._last = batch if goes_on else None
        return batch


def _logits_rows(step: StepArrays, cu_seqlens: Int32) -> Int32:
    """Rows of T whose logits are wanted."""
    last_B = cu_seqlens[1:] - np.int32(1)
    if step.prompt_rows is None:
        return last_B if step.samples_B.all() else last_B[step.samples_B]
    rows: list[int] = []
    offsets = (step.starts_B - cu_seqlens[:-1]).tolist()  # position minus row
    for (first, end), offset, last, samples in zip(
        step.prompt_rows, offsets, last_B.tolist(), step.samples_B.tolist(), strict=True
    ):
        rows += range(first - offset, end - offset)
        if samples:
            rows.append(last)
    return np.array(rows, np.int32)
