"""What a step samples by, where the session does it itself: one entry per row of logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class SequenceEdits:
    """What is done to a sequence's logits, as it stands before its next token; kept where it is sampled."""

    seat: int
    """Its place there, below max_batch_size."""
    token_ids: Int32
    """Its distinct tokens, where penalties count them."""
    counts: Int32
    """How often each was generated; 0x8000 more: the prompt has it."""
    unknown: int
    """0, or below zero a token more that the step submitted before samples: -1 for its first row."""
    bias_ids: Int32
    bias: Float32
    """What is added to the logits of ``bias_ids``; -inf: excluded."""
    end_ids: Int32
    """Excluded while the answer is shorter than min_tokens."""
    allowed_ids: Int32 | None
    """The only tokens that may come; None: all."""


@dataclass(frozen=True, kw_only=True)
class LogitsEdits:
    """Masks, bias and penalties of a step's rows."""

    begins: Sequence[SequenceEdits]
    """Sequences that the session has not seen since they took their seat."""
    seat_N: Int32
    """-1: the row's logits are left as they are."""
    masked_N: Int32
    """Whether only allowed tokens may come."""
    short_N: Int32
    """Whether the answer is shorter than min_tokens."""
    repetition_N: Float32
    frequency_N: Float32
    presence_N: Float32


@dataclass(frozen=True, kw_only=True)
class SamplingInputs:
    """As the parameters of ``kernels.sampling.reference.sample``; ``uniform_N``: the random numbers, in
    [0, 1), of each row's (seed, position). No array is changed after it was given: one that comes again holds
    what it held."""

    temperature_N: Float32
    top_k_N: Int32
    top_p_N: Float32
    min_p_N: Float32
    uniform_N: Float32
    edits: LogitsEdits | None = None
    """None: no row has any."""
    logprobs_N: Int32 | None = None
    """Alternatives wanted with each row's log-probability, -1: none wanted; None: by no row."""


def greedy(rows: int) -> SamplingInputs:
    """The most likely token of each of ``rows`` rows of logits."""
    zeros, ones = np.zeros(rows, np.float32), np.ones(rows, np.float32)
    return SamplingInputs(
        temperature_N=zeros, top_k_N=np.zeros(rows, np.int32), top_p_N=ones, min_p_N=zeros, uniform_N=zeros
    )


@dataclass(frozen=True, kw_only=True)
class StepLogprobs:
    """Of the model's own logits, before edits; only for rows that want them."""

    chosen_N: Float32
    ranks_N: Int32
    token_ids_Nk: Int32
    logprobs_Nk: Float32


#: Instead of a token: the logits are not finite; every token is excluded.
NOT_FINITE, ALL_EXCLUDED = -1, -2


class PendingStep(Protocol):
    """A step that was submitted and may still run."""

    def tokens(self) -> Int32:
        """The token of each row of logits (N,), ``NOT_FINITE`` or ``ALL_EXCLUDED``. Waits."""
        ...

    def logprobs(self) -> StepLogprobs | None:
        """Where ``SamplingInputs.logprobs_N`` asked for them. After ``tokens``."""
        ...
