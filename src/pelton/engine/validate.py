"""Checks of a step before it touches the KV cache: shapes, limits, ranges."""

from __future__ import annotations

import numpy as np

from pelton.engine.batch import AttentionMetadata, DecodeRun, InputBatch, Int32
from pelton.engine.config import EngineConfig
from pelton.engine.kv_cache import sequence_blocks


class BatchChecker:
    """Holds an engine's limits; ``check`` raises ``ValueError`` naming what breaks the contract."""

    def __init__(self, config: EngineConfig, num_blocks: tuple[int, ...], max_logits: int) -> None:
        build = config.build
        assert build.max_num_tokens and build.max_batch_size and build.max_seq_len and build.block_size
        self._max_tokens = build.max_num_tokens
        self._max_batch = build.max_batch_size
        self._max_seq_len = build.max_seq_len
        self._block_size = build.block_size
        self._columns = sequence_blocks(config)
        self._vocab = config.model.vocab_size
        self._num_blocks = num_blocks
        self._max_logits = max_logits
        self._run: DecodeRun | None = None
        """That of the batch checked last, of ``_rows`` sequences."""
        self._rows = 0

    def check(self, batch: InputBatch, *, unsampled: bool = False) -> None:
        """Raise ``ValueError`` unless the engine can run ``batch``.

        ``unsampled``: ids below zero stand for tokens of the step before.
        """
        if batch.run is not None and batch.run is self._run:
            self._check_next(batch)
            return
        self._run = None
        tokens = batch.input_ids_T.size
        _array("input_ids", batch.input_ids_T, (tokens,))
        _array("positions", batch.positions_T, (tokens,))
        if not 1 <= tokens <= self._max_tokens:
            raise ValueError(f"a step has 1 to {self._max_tokens} tokens (max_num_tokens), not {tokens}")
        _range("input_ids", batch.input_ids_T, -self._max_logits if unsampled else 0, self._vocab)
        _range("positions", batch.positions_T, 0, self._max_seq_len)
        wanted = batch.logits_indices_N.size
        _array("logits_indices", batch.logits_indices_N, (wanted,))
        most = min(self._max_logits, self._max_batch) if unsampled else self._max_logits
        if wanted > most:
            raise ValueError(f"a step gives at most {most} rows of logits, not {wanted}")
        if wanted:
            rows_N = batch.logits_indices_N
            if wanted > 1 and not (rows_N[1:] > rows_N[:-1]).all():
                raise ValueError("logits_indices must be ascending")
            if rows_N[0] < 0 or rows_N[-1] >= tokens:
                _range("logits_indices", rows_N, 0, tokens)
        if len(batch.groups) != len(self._num_blocks):
            raise ValueError(
                f"the engine has {len(self._num_blocks)} KV groups, the batch {len(batch.groups)}"
            )
        for i, group in enumerate(batch.groups):
            self._check_group(i, group, tokens)
        self._run, self._rows = batch.run, tokens

    def _check_next(self, batch: InputBatch) -> None:
        """Of a run's next step what is not as in the one before."""
        shape, lens_B = (self._rows,), batch.groups[0].seq_lens_B
        _array("positions", batch.positions_T, shape)
        _range("positions", batch.positions_T, 0, self._max_seq_len)
        _array("seq_lens", lens_B, shape)
        _range("seq_lens", lens_B, 0, self._max_seq_len + 1)
        for i, group in enumerate(batch.groups):
            _array(f"slot_mapping.{i}", group.slot_mapping_T, shape)
            _range(f"slot_mapping.{i}", group.slot_mapping_T, 0, self._num_blocks[i] * self._block_size)

    def _check_group(self, index: int, group: AttentionMetadata, tokens: int) -> None:
        sequences = group.seq_lens_B.size
        if not 1 <= sequences <= self._max_batch:
            raise ValueError(f"a step has 1 to {self._max_batch} sequences (max_batch_size), not {sequences}")
        _array("seq_lens", group.seq_lens_B, (sequences,))
        _array("cu_seqlens", group.cu_seqlens, (sequences + 1,))
        _array(f"slot_mapping.{index}", group.slot_mapping_T, (tokens,))
        _array(f"block_table.{index}", group.block_table_BM, (sequences, self._columns))
        queries = group.cu_seqlens[1:] - group.cu_seqlens[:-1]
        if group.cu_seqlens[0] != 0 or group.cu_seqlens[-1] != tokens or (queries < 0).any():
            raise ValueError(f"cu_seqlens must rise from 0 to the number of tokens, {tokens}")
        longest = int(group.seq_lens_B.max())
        if (group.seq_lens_B < queries).any() or longest > self._max_seq_len:
            raise ValueError(
                f"seq_lens must lie between a sequence's tokens in this step and {self._max_seq_len} "
                "(max_seq_len)"
            )
        blocks = self._num_blocks[index]
        _range(f"slot_mapping.{index}", group.slot_mapping_T, -1, blocks * self._block_size)
        # Beyond the longest sequence's blocks a table is not read.
        columns = -(-longest // self._block_size)
        _range(f"block_table.{index}", group.block_table_BM[:, :columns], 0, blocks)


def _array(name: str, value: Int32, shape: tuple[int, ...]) -> None:
    if value.dtype != np.int32 or value.shape != shape or not value.flags.c_contiguous:
        raise ValueError(
            f"{name} must be contiguous int32 of shape {shape}, not {value.dtype} of shape {value.shape}"
        )


def _range(name: str, value: Int32, low: int, high: int) -> None:
    # Without a sign, what is below zero is large: one pass finds both.
    if low == 0 and np.maximum.reduce(value.view(np.uint32), axis=None) < high:
        return
    if value.min() < low or value.max() >= high:
        raise ValueError(
            f"{name} must lie in {low}..{high - 1}, and has {int(value.min())}..{int(value.max())}"
        )
