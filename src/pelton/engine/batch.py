"""What crosses from the executor into a session: one step's packed tokens (the step contract)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pelton.engine.config import EngineConfig

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class AttentionMetadata:
    """One KV group's view of the step. All arrays are contiguous int32.

    T tokens of B sequences are packed in order; sequence b owns rows
    ``cu_seqlens[b]:cu_seqlens[b+1]``. ``cu_seqlens`` and ``seq_lens`` are the same in every group.
    """

    slot_mapping_T: Int32
    """Where each token's K and V go: block * block_size + offset; -1: nowhere."""
    block_table_BM: Int32
    """Blocks of each sequence in order, M = ceil(max_seq_len / block_size) columns. Unused ones are 0 as far
    as the longest sequence reaches, and anything beyond."""
    cu_seqlens: Int32
    """(B+1,), starts with 0."""
    seq_lens_B: Int32
    """Tokens whose KV exists after this step: those computed before plus this step's."""


class DecodeRun:
    """Steps submitted one right after another, of the same sequences in the same rows, one token each.

    In each but the first of them, ``input_ids`` are -1, -2, .. (the tokens that the step before samples),
    every position and length is one more than before, ``cu_seqlens`` and ``logits_indices`` are the same
    arrays, and of the part of block tables that is read only the entry of a token that begins a block can be
    new; slots are 0 or more. So whoever has dealt with the step before need not look at all of it again.
    """

    __slots__ = ()


@dataclass(frozen=True, kw_only=True)
class InputBatch:
    """One step."""

    input_ids_T: Int32
    positions_T: Int32
    groups: tuple[AttentionMetadata, ...]
    logits_indices_N: Int32
    """Rows of T whose logits are wanted, ascending."""
    run: DecodeRun | None = None
    """The run that the step is of, the same object in all its steps."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """``logits_NV`` and requested tensors are views, valid until the session's next run."""

    logits_NV: Float32
    outputs: dict[str, npt.NDArray[np.generic]]


class ModelSession(Protocol):
    """An engine loaded on a device: what the executor drives. ``engine.session.Session`` is one;
    tests drive the executor with fakes that need no model."""

    config: EngineConfig
    num_blocks: tuple[int, ...]
    """Blocks of each KV group's cache; block 0 is an ordinary block."""

    def run(self, batch: InputBatch, outputs: Sequence[str] = ()) -> StepResult:
        """Compute one step and write its KV. Raises ``ValueError`` when the batch breaks the
        contract (sizes beyond the engine's limits); the KV cache is then untouched."""
        ...

    def close(self) -> None:
        """Free everything; idempotent."""
        ...
