"""Sampling by the native library (``csrc/sample.cpp``), with the signatures of ``reference``."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pelton.kernels.native import load_library

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]


@functools.cache
def _functions() -> tuple[Callable[..., int], Callable[..., int]]:
    lib = load_library()
    pointer, i64 = ctypes.c_void_p, ctypes.c_int64
    sample, topk = lib.pelton_sample, lib.pelton_log_softmax_topk
    sample.restype = topk.restype = ctypes.c_int
    sample.argtypes = (pointer, i64, i64, i64, *(pointer,) * 8)
    topk.argtypes = (pointer, i64, i64, i64, pointer, i64, *(pointer,) * 4)
    return sample, topk


def _rows(logits_NV: Float32) -> tuple[Float32, int]:
    """Rows whose elements are adjacent, and the distance between rows in elements."""
    assert logits_NV.dtype == np.float32
    if logits_NV.strides[1] != 4 or logits_NV.strides[0] % 4:
        logits_NV = np.ascontiguousarray(logits_NV)
    return logits_NV, logits_NV.strides[0] // 4


def _column(values: Any, dtype: type[np.generic], n: int) -> npt.NDArray[Any]:
    column = np.ascontiguousarray(values, dtype)
    assert column.shape == (n,)
    return column


def _check(code: int) -> None:
    if code:
        raise MemoryError("out of memory while sampling")


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
    n, vocab = logits_NV.shape
    logits, stride = _rows(logits_NV)
    seeds = [int(s) & (1 << 64) - 1 for s in seed_N]
    columns = [
        _column(values, dtype, n)
        for values, dtype in (
            (temperature_N, np.float32),
            (top_k_N, np.int32),
            (top_p_N, np.float32),
            (min_p_N, np.float32),
            (seeds, np.uint64),
            (position_N, np.int64),
        )
    ]
    tokens, logprobs = np.zeros(n, np.int32), np.zeros(n, np.float32)
    _check(
        _functions()[0](
            logits.ctypes.data,
            stride,
            n,
            vocab,
            *(c.ctypes.data for c in columns),
            tokens.ctypes.data,
            logprobs.ctypes.data if want_logprobs else None,
        )
    )
    return tokens, logprobs


def log_softmax_topk(
    logits_NV: Float32, chosen_N: Sequence[int] | Int32, k: int
) -> tuple[Float32, Int32, Int32, Float32]:
    """As ``reference.log_softmax_topk``."""
    n, vocab = logits_NV.shape
    assert 0 <= k <= vocab
    logits, stride = _rows(logits_NV)
    chosen = _column(chosen_N, np.int32, n)
    assert n == 0 or (chosen.min() >= 0 and chosen.max() < vocab)
    chosen_logprobs, ranks = np.zeros(n, np.float32), np.zeros(n, np.int32)
    ids, logprobs = np.zeros((n, k), np.int32), np.zeros((n, k), np.float32)
    outputs = (chosen_logprobs, ranks, ids, logprobs)
    _check(
        _functions()[1](
            logits.ctypes.data,
            stride,
            n,
            vocab,
            chosen.ctypes.data,
            k,
            *(o.ctypes.data for o in outputs),
        )
    )
    return outputs
