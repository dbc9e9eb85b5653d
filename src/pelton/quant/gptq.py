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
#: Columns of a Hessian that are factored at once; largest triangular matrix that is inverted at once.
_PANEL = 256
#: Columns of a product that is held beside a Hessian or a weight.
_STRIP = 1024


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
    diagonal = np.diag(gram)
    dead = diagonal == 0
    values = np.where(dead, np.float32(0), weight) if dead.any() else weight
    size = group_of(quant) or columns
    # To the nearest float16: misses of either sign, which later columns take over (SmolLM2-135M in int4_g64:
    # perplexity 13.9, and 15.3 when all lower ends miss outwards).
    fitted = fit_weight(
        np.ascontiguousarray(values), quant, symmetric=symmetric, per_tensor=per_tensor, outwards=False
    )
    # Whole rows share a scale: nothing to fit on the way.
    static = act_order or size == columns
    order = np.argsort(-diagonal, kind="stable") if act_order else np.arange(columns)
    # The one copy; (columns, rows).
    w = values.T[order].astype(np.float32, copy=False)
    del values
    u = inverse_factor(gram, damping, order)
    codes = np.empty((columns, rows), np.uint8)
    for start in range(0, columns, BLOCK_COLUMNS):
        stop = min(start + BLOCK_COLUMNS, columns)
        errors = np.empty((stop - start, rows), np.float32)
        for j in range(start, stop):
            group = order[j] // size
            if not static and j % size == 0:
                values = np.ascontiguousarray(w[j : j + size].T)
                now = fit_weight(values, quant, symmetric=symmetric, outwards=False, row=fitted.row)
                _put(fitted, now, group)
            scales = _of_group(fitted, group)
            q = codes_of(w[j][:, None, None], scales, quant)
            codes[order[j]] = q[:, 0, 0]
            error = (w[j] - values_of(q, scales, quant)[:, 0, 0]) / u[j, j]
            w[j + 1 : stop] -= u[j, j + 1 : stop, None] * error
            errors[j - start] = error
        for after in range(stop, columns, _STRIP):
            rest = slice(after, after + _STRIP)
            w[rest] -= u[start:stop, rest].T @ errors
    return pack(quant, np.ascontiguousarray(codes.T).reshape(rows, -1, size), fitted)


def _of_group(scales: Scales, group: int) -> Scales:
    one = slice(group, group + 1)
    return Scales(scales.d[:, one], None if scales.z is None else scales.z[:, one])


def _put(scales: Scales, part: Scales, group: int) -> None:
    scales.d[:, group] = part.d[:, 0]
    if scales.z is not None and part.z is not None:
        scales.z[:, group] = part.z[:, 0]


def inverse_factor(gram: Float32, damping: float, order: npt.NDArray[Any] | None = None) -> Float32:
    """Upper triangular U with U^T U = H^-1, H = 2 gram + damping times its mean diagonal, of the columns in
    ``order``.

    Channels that were always 0 get a diagonal of 1. Where H is singular to working precision, damping is
    raised tenfold until it is not. One matrix of the Gram matrix's size is made, and nothing else that large:
    those of wide layers are the largest arrays of all. Raises ``ValueError`` for a Gram matrix with values
    that are not finite.
    """
    if not _finite(gram):
        raise ValueError("the Gram matrix has NaN or infinite values")
    kind: npt.DTypeLike = np.float64 if len(gram) <= _DOUBLE else np.float32
    # H = A A^T with A upper triangular is the lower factor of H read from its end.
    end = np.arange(len(gram))[::-1] if order is None else order[::-1]
    diagonal = 2 * np.diag(gram)[end].astype(kind)
    step = damping * np.where(diagonal == 0, 1, diagonal).mean()
    added = 0.0
    while True:
        added += step
        h = _taken(gram, end, kind)
        np.fill_diagonal(h, np.where(diagonal == 0, 1, diagonal) + added)
        try:
            _factor_lower(h)
            break
        except np.linalg.LinAlgError:
            step = 9 * added  # ten times as much in all
            del h
    # H^-1 = A^-T A^-1.
    _invert_lower(h)
    return h[::-1, ::-1].astype(np.float32, copy=False)


def _finite(values: Float32) -> bool:
    return all(np.isfinite(row).all() for row in values)


def _taken(gram: Float32, order: npt.NDArray[Any], kind: npt.DTypeLike) -> npt.NDArray[Any]:
    """Twice the rows and columns of ``gram`` in an order."""
    h = np.empty(gram.shape, kind)
    for row, source in zip(h, order, strict=True):
        np.multiply(gram[source, order], 2, out=row)
    return h


def _factor_lower(h: npt.NDArray[Any]) -> None:
    """Replace a symmetric matrix by its lower Cholesky factor, in panels from the left, without a copy of it.

    Raises ``LinAlgError`` where it is not positive definite.
    """
    n = len(h)
    for start in range(0, n, _PANEL):
        stop = min(start + _PANEL, n)
        h[start:stop, start:stop] = corner = np.linalg.cholesky(h[start:stop, start:stop])
        h[start:stop, stop:] = 0
        below = h[stop:, start:stop] @ np.linalg.inv(corner).T
        h[stop:, start:stop] = below
        for column in range(stop, n, _STRIP):
            rest = slice(column, column + _STRIP)
            h[column:, rest] -= below[column - stop :] @ below[column - stop : column - stop + _STRIP].T


def _invert_lower(a: npt.NDArray[Any]) -> None:
    """Replace a lower triangular matrix by its inverse, half by half, without a copy of it."""
    n = len(a)
    if n <= _PANEL:
        a[:] = np.tril(np.linalg.inv(a))
        return
    first, rest = slice(0, n // 2), slice(n // 2, n)
    _invert_lower(a[first, first])
    _invert_lower(a[rest, rest])
    for column in range(0, n // 2, _STRIP):
        strip = slice(column, min(column + _STRIP, n // 2))
        # From the left columns on: those of the first half that are right of them have not changed yet.
        a[rest, strip] = -(
            a[rest, rest] @ (a[rest, first][:, strip.start :] @ a[first, strip][strip.start :])
        )
