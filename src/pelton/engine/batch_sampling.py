"""What a step samples by, where the session does it itself: one entry per row of logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class SamplingInputs:
    """As the parameters of ``kernels.sampling.reference.sample``; ``uniform_N``: the random numbers, in
    [0, 1), of each row's (seed, position)."""

    temperature_N: Float32
    top_k_N: Int32
    top_p_N: Float32
    min_p_N: Float32
    uniform_N: Float32


def greedy(rows: int) -> SamplingInputs:
    """The most likely token of each of ``rows`` rows of logits."""
    zeros, ones = np.zeros(rows, np.float32), np.ones(rows, np.float32)
    return SamplingInputs(
        temperature_N=zeros, top_k_N=np.zeros(rows, np.int32), top_p_N=ones, min_p_N=zeros, uniform_N=zeros
    )


class PendingStep(Protocol):
    """A step that was submitted and may still run."""

    def tokens(self) -> Int32:
        """The token of each row of logits (N,), -1 where the logits are not finite. Waits."""
        ...
