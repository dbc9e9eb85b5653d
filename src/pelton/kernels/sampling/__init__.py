"""Choosing tokens from logits: by the native library where it is installed, else in numpy.

Both give the same tokens; ``reference`` states the rules.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pelton.kernels import native as library
from pelton.kernels.sampling import native, reference

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]


def sample(
    logits_NV: Float32,
    temperature_N: Sequence[float] | Float32,
    top_k_N: Sequence[int] | Int32,
    top_p_N: Sequence[float] | Float32,
    min_p_N: Sequence[float] | Float32,
    seed_N: Sequence[int] | npt.NDArray[np.uint64],
    position_N: Sequence[int] | npt.NDArray[np.int64],
    *,
    want_logprobs: bool = True,
) -> tuple[Int32, Float32]:
    """As ``reference.sample``; without ``want_logprobs`` the log-probabilities are zeros."""
    run = native.sample if library.available() else reference.sample
    return run(
        logits_NV,
        temperature_N,
        top_k_N,
        top_p_N,
        min_p_N,
        seed_N,
        position_N,
        want_logprobs=want_logprobs,
    )


def log_softmax_topk(
    logits_NV: Float32, chosen_N: Sequence[int] | Int32, k: int
) -> tuple[Float32, Int32, Int32, Float32]:
    """As ``reference.log_softmax_topk``."""
    run = native.log_softmax_topk if library.available() else reference.log_softmax_topk
    return run(logits_NV, chosen_N, k)
