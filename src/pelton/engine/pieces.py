"""Steps made by hand, without a scheduler: for checks, profiles, debugging and tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pelton.engine.batch import AttentionMetadata, InputBatch
from pelton.engine.config import EngineConfig
from pelton.engine.kv_cache import sequence_blocks


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Tokens of one sequence in a step, after ``start`` earlier ones; ``blocks``: its block table."""

    tokens: npt.NDArray[np.int32]
    start: int
    blocks: npt.NDArray[np.int32]


def most_rows(config: EngineConfig) -> int:
    """Tokens of a step whose logits may all be wanted."""
    build = config.build
    assert build.max_num_tokens
    return max((p.dims["N"].max for p in build.profiles or ()), default=build.max_num_tokens)


def make_batch(
    pieces: Sequence[Piece], config: EngineConfig, logits: Sequence[int] | None = None
) -> InputBatch:
    """The step of ``pieces``, the same blocks in every KV group; ``logits``: rows (default: all)."""
    block_size = config.build.block_size
    assert block_size is not None
    positions = [np.arange(p.start, p.start + p.tokens.size, dtype=np.int32) for p in pieces]
    slots = [
        p.blocks[pos // block_size] * block_size + pos % block_size
        for p, pos in zip(pieces, positions, strict=True)
    ]
    table = np.zeros((len(pieces), sequence_blocks(config)), np.int32)
    for row, piece in zip(table, pieces, strict=True):
        row[: piece.blocks.size] = piece.blocks
    lengths = np.array([p.tokens.size for p in pieces])
    group = AttentionMetadata(
        slot_mapping_T=np.concatenate(slots).astype(np.int32),
        block_table_BM=table,
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        seq_lens_B=np.array([p.start + p.tokens.size for p in pieces], np.int32),
    )
    rows = range(int(lengths.sum())) if logits is None else logits
    return InputBatch(
        input_ids_T=np.concatenate([p.tokens for p in pieces]).astype(np.int32),
        positions_T=np.concatenate(positions),
        groups=(group,) * len(config.model.kv_groups),
        logits_indices_N=np.array(rows, np.int32),
    )
