"""GPTQ (Frantar et al. 2022, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers").

Columns are rounded one after another, and after each the columns that are left take over its error on the
calibration inputs. With the Hessian of the layer's squared output error H = 2 X^T X + damping, and U the
upper triangular factor of its inverse (H^-1 = U^T U), rounding column j of the (already corrected) weight
to q_j moves the columns k > j by -(w_j - q_j) / U_jj * U_jk. Corrections within a block of 128 columns are
applied at once, those of later columns in one product when the block is done (lazy batches).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from pelton.ir.group_blocks import Float32, group_of
from pelton.ir.group_encoder import Scales, codes_of, pack, values_of
from pelton.ir.tensors import HostTensor
from pelton.quant.rounding import fit_weight

Floats = npt.NDArray[Any]

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
    row: Float32 | None = None,
) -> HostTensor:
    """``weight`` (rows, K) in codes of ``quant`` for inputs of Gram matrix ``gram`` (K, K).

    ``act_order`` takes the columns by falling diagonal of the Hessian; scales are then those of the weight
    as it was (static groups), so that groups stay contiguous. Otherwise a group's scales are fitted to its
    corrected values when its first column is reached. Input channels that were always 0 become 0. ``row``: as
    ``fit_weight``'s.
    """
    rows, columns = weight.shape
    diagonal = np.diag(gram).copy()
    dead = diagonal == 0
    size = group_of(quant) or columns
    # To the nearest float16: misses of either sign, which later columns take over (SmolLM2-135M in int4_g64:
    # perplexity 13.9, and 15.3 when all lower ends miss outwards).
    fitted = fit_weight(
        np.where(dead, np.float32(0), weight) if dead.any() else weight,
        quant,
        symmetric=symmetric,
        per_tensor=per_tensor,
        outwards=False,
        row=row,
    )
    # Whole rows share a scale: nothing to fit on the way.
    static = act_order or size == columns
    order = np.argsort(-diagonal, kind="stable") if act_order else np.arange(columns)
    # The one copy; (columns, rows).
    w = weight.T[order].astype(np.float32, copy=False)
    w[dead[order]] = 0
    codes = np.empty((columns, rows), np.uint8)
    with inverse_factor(gram, damping, order) as u:
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
    del w
    return pack(quant, np.ascontiguousarray(codes.T).reshape(rows, -1, size), fitted)


def _of_group(scales: Scales, group: int) -> Scales:
    one = slice(group, group + 1)
    return Scales(scales.d[:, one], None if scales.z is None else scales.z[:, one])


def _put(scales: Scales, part: Scales, group: int) -> None:
    scales.d[:, group] = part.d[:, 0]
    if scales.z is not None and part.z is not None:
        scales.z[:, group] = part.z[:, 0]


@contextmanager
def inverse_factor(gram: Float32, damping: float, order: npt.NDArray[Any] | None = None) -> Iterator[Float32]:
    """Upper triangular U with U^T U = H^-1, H = 2 gram + damping times its mean diagonal, of the columns in
    ``order``. What is below U's diagonal is not of it.

    A wide Gram matrix is the largest array of all: U takes one half of it while the other keeps what it was,
    and after the block it is as before (where the halves differ by rounding, as the kept one). Channels that
    were always 0 get a diagonal of 1. Where H is singular to working precision, damping is raised tenfold
    until it is not. Raises ``ValueError`` for a Gram matrix with values that are not finite.
    """
    if not all(np.isfinite(row).all() for row in gram):
        raise ValueError("the Gram matrix has NaN or infinite values")
    # H = A A^T with A upper triangular is the lower factor of H read from its end.
    end = np.arange(len(gram))[::-1] if order is None else order[::-1]
    diagonal = np.diag(gram)[end]
    if len(gram) <= _DOUBLE:
        yield _narrow_factor(gram, end, diagonal, damping)
        return
    _permute(gram, end)
    try:
        _invert_damped(gram, diagonal, damping)
        yield gram[::-1, ::-1]
    finally:
        _mirror(gram, diagonal)
        _permute(gram, np.argsort(end))


def _narrow_factor(gram: Float32, order: npt.NDArray[Any], diagonal: Float32, damping: float) -> Float32:
    """U, made in float64."""
    h = gram[np.ix_(order, order)].astype(np.float64)
    _invert_damped(h, diagonal, damping)
    u: Float32 = h[::-1, ::-1].astype(np.float32)
    return u


def _invert_damped(h: Floats, diagonal: Float32, damping: float) -> None:
    """Replace the lower half of a Gram matrix with this diagonal by A^-1, of A A^T = twice it, damped."""
    twice = np.where(diagonal == 0, 1, 2 * diagonal).astype(h.dtype)
    step = damping * twice.mean()
    added = 0.0
    while True:
        added += step
        for i, row in enumerate(h):
            row[:i] *= 2
        np.fill_diagonal(h, twice + added)
        try:
            _factor_lower(h)
            break
        except np.linalg.LinAlgError:
            step = 9 * added  # ten times as much in all
            _mirror(h, diagonal)
    # H^-1 = A^-T A^-1.
    _invert_lower(h)


def _permute(h: Floats, order: npt.NDArray[Any]) -> None:
    """Put rows and columns in an order, in place."""
    for row in h:
        row[:] = row[order]
    done = np.zeros(len(h), bool)
    for start in range(len(h)):
        if done[start]:
            continue
        # Around a cycle each row takes the values of the next.
        first, at = h[start].copy(), start
        while (following := int(order[at])) != start:
            h[at] = h[following]
            done[at], at = True, following
        h[at] = first
        done[at] = True


def _mirror(h: Floats, diagonal: Float32) -> None:
    """Make the lower half the upper one's, and the diagonal this one, in place."""
    for start in range(0, len(h), _PANEL):
        panel = slice(start, start + _PANEL)
        h[panel, :start] = h[:start, panel].T
        above = np.triu(h[panel, panel], 1)
        h[panel, panel] = above + above.T
    np.fill_diagonal(h, diagonal)


def _factor_lower(h: Floats) -> None:
    """Replace the lower half of a symmetric matrix by its Cholesky factor, in panels from the left.

    The upper half is neither read nor written. Raises ``LinAlgError`` where it is not positive definite.
    """
    n = len(h)
    for start in range(0, n, _PANEL):
        stop = min(start + _PANEL, n)
        corner = np.linalg.cholesky(h[start:stop, start:stop])  # reads the lower half
        _set_lower(h[start:stop, start:stop], corner)
        below = h[stop:, start:stop] @ np.linalg.inv(corner).T
        h[stop:, start:stop] = below
        for column in range(stop, n, _STRIP):
            end = min(column + _STRIP, n)
            product = below[column - stop :] @ below[column - stop : end - stop].T
            on, under = h[column:end, column:end], h[end:, column:end]
            _set_lower(on, on - product[: end - column])
            under -= product[end - column :]


def _invert_lower(a: Floats) -> None:
    """Replace the lower half by that of its inverse, a lower triangular matrix's, half by half.

    The upper half is neither read nor written.
    """
    n, middle = len(a), len(a) // 2
    if n <= _PANEL:
        _set_lower(a, np.linalg.inv(np.tril(a)))
        return
    first, rest, between = a[:middle, :middle], a[middle:, middle:], a[middle:, :middle]
    _invert_lower(first)
    _invert_lower(rest)
    for column in range(0, middle, _STRIP):
        # From the left columns on: those of the first half that are right of them have not changed yet.
        strip = slice(column, min(column + _STRIP, middle))
        product = between[:, column:] @ np.tril(first[column:, strip])
        for row in range(0, n - middle, _STRIP):
            end = min(row + _STRIP, n - middle)
            between[row:end, strip] = -(np.tril(rest[row:end, :end], row) @ product[:end])


def _set_lower(a: Floats, values: Floats) -> None:
    np.copyto(a, values, where=np.tri(len(a), dtype=bool))
