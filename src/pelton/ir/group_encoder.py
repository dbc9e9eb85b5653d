"""Encode values in the types of ``group_blocks.py`` by rounding to nearest: what algorithms must beat.

Scales span each group's range. numpy only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pelton.ir.blocks import row_chunks
from pelton.ir.group_blocks import (
    _CODEBOOK,
    E2M1,
    E4M3,
    E4M3_MAX,
    Float32,
    UInt8,
    bits_of,
    from_codes,
    group_of,
    to_e4m3,
)
from pelton.ir.tensors import HostTensor


class ScaleRangeError(ValueError):
    """A type cannot store the scale of some group of values."""


class Scales(NamedTuple):
    """What the values of a tensor's groups are rounded with, as the type stores it."""

    d: Float32
    """(rows, groups), or (rows, 1) of row types: a decoder multiplies with these."""
    z: UInt8 | None = None
    """(rows, groups): zero points of the ``int<n>_g<size>`` types."""
    row: Float32 | None = None
    """(rows, 1): the header of nvfp4, by which the stored group scales are divided."""

    def of_rows(self, shape: tuple[int, ...]) -> Iterator[tuple[slice, Scales]]:
        """Pieces of the rows of values (rows, groups, g), with their scales."""
        for rows in row_chunks(shape[0], math.prod(shape[1:])):
            z = None if self.z is None else self.z[rows]
            yield rows, Scales(self.d[rows], z, None if self.row is None else self.row[rows])


def encode(x: Float32, quant: str, *, symmetric: bool = False) -> HostTensor:
    """``x``, (rows, cols) finite float32, as ``quant``; cols a whole number of its groups.

    ``symmetric``: the zero point of an ``int<n>_g<size>`` type is the middle code (the others have none).
    """
    grouped = into_groups(x, quant)
    scales = fit(grouped, quant, symmetric=symmetric)
    return encode_with(grouped, scales, quant)


def encode_with(grouped: Float32, scales: Scales, quant: str) -> HostTensor:
    """The tensor of the nearest codes of the values (rows, groups, g); some rows at a time."""
    codes = np.empty(grouped.shape, np.uint8)
    for rows, part in scales.of_rows(grouped.shape):
        codes[rows] = codes_of(grouped[rows], part, quant)
    return pack(quant, codes, scales)


def rounded_with(grouped: Float32, scales: Scales, quant: str) -> Float32:
    """The values of the nearest codes of the values (rows, groups, g); some rows at a time."""
    values = np.empty_like(grouped)
    for rows, part in scales.of_rows(grouped.shape):
        values[rows] = values_of(codes_of(grouped[rows], part, quant), part, quant)
    return values


def into_groups(x: Float32, quant: str) -> Float32:
    """(rows, cols) -> (rows, groups, values that share a scale)."""
    rows, cols = x.shape
    return np.ascontiguousarray(x, np.float32).reshape(rows, -1, group_of(quant) or cols)


def fit(
    grouped: Float32,
    quant: str,
    *,
    symmetric: bool = False,
    outwards: bool = True,
    row: Float32 | None = None,
) -> Scales:
    """The scales that span each group (rows, groups, g) of finite values.

    ``outwards``: as ``integer_scales``'s. ``row``: of nvfp4, the header to keep instead of that of these
    values.
    """
    if quant.startswith("int") and quant != "int8_row":
        return Scales(*integer_scales(grouped, bits_of(quant), symmetric=symmetric, outwards=outwards))
    top = largest_size(grouped, -1)
    if quant == "nvfp4":
        row = _nvfp4_row(top) if row is None else row
        return Scales(row * E4M3[to_e4m3(top / E2M1.max() / row)], row=row)
    if quant == "mxfp4":
        return Scales(_mxfp4_scale(top))
    return Scales(top / largest(quant))


def largest_size(values: Float32, axis: int) -> Float32:
    """max|x| along an axis, without an array of the values' size."""
    found: Float32 = np.maximum(np.abs(values.max(axis=axis)), np.abs(values.min(axis=axis)))
    return found


def largest(quant: str) -> np.float32:
    """The largest value of a code of a type without zero points."""
    if quant == "int8_row":
        return np.float32(127)
    return np.float32(E4M3_MAX) if quant.startswith("fp8") else np.float32(_CODEBOOK[quant].max())


def codes_of(grouped: Float32, scales: Scales, quant: str) -> UInt8:
    """The nearest codes of the values (rows, groups, g); int8_row's are int8 bit patterns."""
    d, z, _ = scales
    if z is not None:
        return integer_codes(grouped, d, z, bits_of(quant))
    if quant == "int8_row":
        return np.clip(np.rint(_divide(grouped, d)), -127, 127).astype(np.int8).view(np.uint8)
    if quant.startswith("fp8"):
        return to_e4m3(_divide(grouped, d))
    return nearest(_divide(grouped, d), _CODEBOOK[quant])


def values_of(codes: UInt8, scales: Scales, quant: str) -> Float32:
    """What codes (rows, groups, g) stand for: as a decoder computes it."""
    d, z, _ = scales
    if z is not None:
        values = codes.astype(np.float32) - z[..., None].astype(np.float32)
    elif quant == "int8_row":
        values = codes.view(np.int8).astype(np.float32)
    else:
        values = (E4M3 if quant.startswith("fp8") else _CODEBOOK[quant])[codes]
    product: Float32 = d[..., None] * values
    return product


def pack(quant: str, codes: UInt8, scales: Scales) -> HostTensor:
    """The tensor of codes (rows, groups, g) and their scales."""
    return from_codes(quant, codes.reshape(len(codes), -1), scales.d, scales.z, scales.row)


def integer_scales(
    grouped: Float32, bits: int, *, symmetric: bool, outwards: bool = True
) -> tuple[Float32, UInt8]:
    """(..., g) values -> scales and zero points (...) of the unsigned ``bits``-bit codes that span them.

    Asymmetric: d = (max - min) / (2^bits - 1) over a range that holds 0, z = round(-min / d). Symmetric:
    d = max|x| / (2^(bits-1) - 1/2), z = 2^(bits-1), so that both ends miss by half a step. Scales are
    float16 values (float32 of 8-bit codes); a group of zeros has scale 0. ``outwards``: those of symmetric
    groups are rounded down, so that the lower end never misses inwards, as the upper one does: a group's
    largest value then keeps its size on average (rounded up it costs SmolLM2-135M 4 % of perplexity in
    int4_g64, and Gemma 3 270M 6 % in int4_g128).
    """
    if symmetric:
        d = largest_size(grouped, -1) / np.float32(2 ** (bits - 1) - 0.5)
        d = _stored(d, bits, down=outwards)
        return d, np.full(d.shape, 1 << (bits - 1), np.uint8)
    low, high = np.minimum(grouped.min(axis=-1), 0), np.maximum(grouped.max(axis=-1), 0)
    d = _stored((high - low) / np.float32(2**bits - 1), bits)
    z = np.clip(np.rint(_divide(-low[..., None], d)[..., 0]), 0, 2**bits - 1)
    return d, z.astype(np.uint8)


def integer_codes(grouped: Float32, d: Float32, z: UInt8, bits: int) -> UInt8:
    """(..., g) values, scales and zero points (...) -> the nearest codes."""
    q = np.rint(_divide(grouped, d)) + z[..., None].astype(np.float32)
    codes: UInt8 = np.clip(q, 0, 2**bits - 1).astype(np.uint8)
    return codes


def nearest(values: Float32, codebook: Float32) -> UInt8:
    """The code of the nearest entry of each value; of two equally near ones the smaller value."""
    order = np.argsort(codebook, kind="stable")
    ascending = codebook[order]
    middle = (ascending[1:] + ascending[:-1]) / 2
    found: UInt8 = order.astype(np.uint8)[np.searchsorted(middle, values)]
    return found


def _stored(d: Float32, bits: int, *, down: bool = False) -> Float32:
    """The scale that a decoder will read: codes are chosen for that one."""
    if bits == 8:
        return d
    rounded = to_half(d)
    if down:
        rounded = np.where(rounded > d, np.nextafter(rounded, np.float16(0)), rounded)
    return rounded.astype(np.float32)


def to_half(scales: npt.NDArray[Any]) -> npt.NDArray[np.float16]:
    """Scales rounded to float16. Raises ``ScaleRangeError`` for those beyond it."""
    with np.errstate(over="ignore"):
        rounded = scales.astype(np.float16)
    if not np.isfinite(rounded).all():
        raise ScaleRangeError(
            f"the values of a group are so large that its scale does not fit in float16 "
            f"({np.abs(scales).max():.2g})"
        )
    return rounded


def _divide(grouped: Float32, d: Float32) -> Float32:
    """Values over their group's scale; 0 where that is 0."""
    safe = np.where(d == 0, np.float32(1), d)[..., None]
    return np.where(d[..., None] == 0, np.float32(0), grouped / safe).astype(np.float32)


def _nvfp4_row(top: Float32) -> Float32:
    """One scale for the tensor in every row; the groups' are e4m3 beside it."""
    return np.full((len(top), 1), nvfp4_scale(top.max()), np.float32)


def nvfp4_scale(top: float | np.float32) -> np.float32:
    """The scale of a tensor whose largest size is ``top``, max|x| / (6 * 448) (NVIDIA's NVFP4 recipe)."""
    tensor = np.float32(top / (E2M1.max() * E4M3_MAX))
    return tensor if tensor > 0 else np.float32(1)


def _mxfp4_scale(top: Float32) -> Float32:
    """2^(floor(log2 max|x|) - 2): OCP Microscaling formats 1.0, section 6.3."""
    _, exponent = np.frexp(top)
    return np.where(top == 0, 0, np.exp2(np.clip(exponent - 1 - 2, -127, 127))).astype(np.float32)
