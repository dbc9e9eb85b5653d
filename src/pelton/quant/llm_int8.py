"""LLM.int8() (Dettmers et al. 2022, "LLM.int8(): 8-bit Matrix Multiplication for Transformers at Scale"):
the product as the paper defines it, for tests of what computes it otherwise."""

from __future__ import annotations

import numpy as np

from pelton.ir.group_blocks import Float32

#: Size from which on a feature is an outlier.
THRESHOLD = 6.0


def product(x: Float32, weight: Float32, threshold: float = THRESHOLD) -> Float32:
    """x (T, K), weight (N, K) -> (T, N): columns of x with outliers multiplied in float32, with the weight's
    dequantised columns; the others in int8 with a scale for each row of x and of the weight."""
    outliers = (np.abs(x) >= threshold).any(axis=0)
    cw = np.abs(weight).max(axis=1, keepdims=True) / np.float32(127)
    qw = np.rint(np.divide(weight, cw, out=np.zeros_like(weight), where=cw > 0)).astype(np.int8)
    regular = np.where(outliers, np.float32(0), x)
    cx = np.abs(regular).max(axis=1, keepdims=True) / np.float32(127)
    qx = np.rint(np.divide(regular, cx, out=np.zeros_like(x), where=cx > 0)).astype(np.int8)
    whole = qx.astype(np.int32) @ qw.T.astype(np.int32)
    exact = x[:, outliers] @ (qw[:, outliers] * cw).T
    result: Float32 = (whole * (cx * cw.T) + exact).astype(np.float32)
    return result
