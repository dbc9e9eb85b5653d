"""What quantised activations are worth: the definition that kernels are held to and statistics come from."""

from __future__ import annotations

import numpy as np

from pelton.ir.activation_quant import ActivationQuant
from pelton.ir.group_blocks import E4M3, E4M3_MAX, Float32, to_e4m3

LARGEST = {"int8": np.float32(127), "fp8": np.float32(E4M3_MAX)}


def rounded_activations(x: Float32, quant: ActivationQuant) -> Float32:
    """``x`` (tokens, K) as ``quant`` stores it: d q, in float32.

    Of ``outliers`` (LLM.int8(), Dettmers et al. 2022) the columns with a value of at least that size in
    the step stay as they are, and the others' scales do not see them.
    """
    if quant.outliers:
        exact = (np.abs(x) >= quant.outliers).any(axis=0)
        rest = rounded_activations(np.where(exact, np.float32(0), x), _without_outliers(quant))
        return np.where(exact, x, rest)
    if quant.group and (left := -x.shape[-1] % quant.group):
        padded = np.pad(x, ((0, 0), (0, left)))  # the last group is what there is of it
        return rounded_activations(padded, quant)[:, : x.shape[-1]]
    top = LARGEST[quant.dtype]
    groups = x.reshape(len(x), -1, quant.group or x.shape[-1])
    if quant.scale > 0:
        d = np.float32(quant.scale)
    elif quant.per == "tensor":
        d = np.abs(x).max(initial=0) / top
    else:
        d = np.abs(groups).max(axis=-1, keepdims=True) / top
    ratio = np.where(d > 0, groups / np.where(d > 0, d, 1), 0).astype(np.float32)
    q = np.clip(np.rint(ratio), -top, top) if quant.dtype == "int8" else E4M3[to_e4m3(ratio)]
    values: Float32 = (d * q).astype(np.float32).reshape(x.shape)
    return values


def static_scale(abs_max: float, dtype: str) -> float:
    """The scale with which values of at most ``abs_max`` fit."""
    return float(np.float32(abs_max) / LARGEST[dtype])


def _without_outliers(quant: ActivationQuant) -> ActivationQuant:
    return ActivationQuant(quant.dtype, quant.per, quant.group, quant.scale)
