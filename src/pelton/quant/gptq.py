"""GPTQ (Frantar et al. 2022, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers").

Columns are rounded one after another, and after each the columns that are left take over its error on the
calibration inputs. With the Hessian of the layer's squared output error H = 2 X^T X + damping, and U the
upper triangular factor of its inverse (H^-1 = U^T U), rounding column j of the (already corrected) weight
to q_j moves the columns k > j by -(w_j - q_j) / U_jj * U_jk. Corrections within a block of 128 columns are
applied at once, those of later columns in one product when the block is done (lazy batches).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pelton.ir.group_blocks import Float32, group_of
from pelton.ir.group_encoder import Scales, codes_of, pack, values_of
from pelton.ir.tensors import HostTensor
from pelton.quant.rounding import fit_weight

#: Columns between products with all that are left.
BLOCK_COLUMNS = 128
#: Most columns of a Hessian that is factored in float64.
_DOUBLE = 4096
#: Largest triangular matrix that is inverted at once.
_INVERTED = 256


def gptq(
    weight: Float32,
    gram: Float32,
    quant: str,
    *,
    symmetric: bool = True,
    per_tensor: bool = False,
    act_order: bool = True,
    damping: float = 0.01,
) -> HostTensor:
    """``weight`` (rows, K) in codes of ``quant`` for inputs of Gram matrix ``gram`` (K, K).

    ``act_order`` takes the columns by falling diagonal of the Hessian; scales are then those of the weight
    as it was (static groups), so that groups stay contiguous. Otherwise a group's scales are fitted to its
    corrected values when its first column is reached. Input channels that were always 0 become 0.
    """
    rows, columns = weight.shape
    w = np.array(weight.T, np.float32, order="C")
    diagonal = np.diag(gram)
    dead = diagonal == 0
    w[dead] = 0
    size = group_of(quant) or columns
    fitted = fit_weight(np.ascontiguousarray(w.T), quant, symmetric=symmetric, per_tensor=per_tensor)
    # Whole rows share a scale: nothing to fit on the way.
    static = act_order or size == columns
    order = np.argsort(-diagonal, kind="stable") if act_order else np.arange(columns)
    u = inverse_factor(gram[np.ix_(order, order)], damping)
    w = w[order]
    codes = np.empty((columns, rows), np.uint8)
    for start in range(0, columns, BLOCK_COLUMNS):
        stop = min(start + BLOCK_COLUMNS, columns)
        errors = np.empty((stop - start, rows), np.float32)
        for j in range(start, stop):
            group = order[j] // size
            if not static and j % size == 0:
                values = np.ascontiguousarray(w[j : j + size].T)
                now = fit_weight(values, quant, symmetric=symmetric, row=fitted.row)
                _put(fitted, now, group)
            scales = _of_group(fitted, group)
            q = codes_of(w[j][:, None, None], scales, quant)
            codes[order[j]] = q[:, 0, 0]
            error = (w[j] - values_of(q, scales, quant)[:, 0, 0]) / u[j, j]
            w[j + 1 : stop] -= u[j, j + 1 : stop, None] * error
            errors[j - start] = error
        w[stop:] -= u[start:stop, stop:].T @ errors
    return pack(quant, np.ascontiguousarray(codes.T).reshape(rows, -1, size), fitted)


def _of_group(scales: Scales, group: int) -> Scales:
    one = slice(group, group + 1)
    return Scales(scales.d[:, one], None if scales.z is None else scales.z[:, one])


def _put(scales: Scales, part: Scales, group: int) -> None:
    scales.d[:, group] = part.d[:, 0]
    if scales.z is not None and part.z is not None:
        scales.z[:, group] = part.z[:, 0]


def inverse_factor(gram: Float32, damping: float) -> Float32:
    """Upper triangular U with U^T U = H^-1, H = 2 gram + damping times its mean diagonal.

    Channels that were always 0 get a diagonal of 1. Where H is singular to working precision, damping is
    raised tenfold until it is not. Raises ``ValueError`` for a Gram matrix with values that are not finite.
    """
    if not np.isfinite(gram).all():
        raise ValueError("the Gram matrix has NaN or infinite values")
    kind: npt.DTypeLike = np.float64 if len(gram) <= _DOUBLE else np.float32
    h = gram.astype(kind)
    h *= 2
    diagonal = np.arange(len(h))
    dead = h[diagonal, diagonal] == 0
    h[dead, dead] = 1
    added, step = 0.0, damping * h[diagonal, diagonal].mean()
    while True:
        h[diagonal, diagonal] += step
        added += step
        try:
            # H = A A^T with A upper triangular: the lower factor of H read from its end.
            a = np.linalg.cholesky(h[::-1, ::-1])[::-1, ::-1]
            break
        except np.linalg.LinAlgError:
            step = 9 * added  # ten times as much in all
    del h
    # H^-1 = A^-T A^-1.
    _invert_upper(a)
    return a.astype(np.float32)


def _invert_upper(a: npt.NDArray[Any]) -> None:
    """Replace an upper triangular matrix by its inverse, half by half, without a copy of it."""
    n = len(a)
    if n <= _INVERTED:
        a[:] = np.triu(np.linalg.inv(a))
        return
    first, rest = slice(0, n // 2), slice(n // 2, n)
    _invert_upper(a[first, first])
    _invert_upper(a[rest, rest])
    a[first, rest] = -(a[first, first] @ a[first, rest]) @ a[rest, rest]
