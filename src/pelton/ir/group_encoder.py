"""Encode values in the types of ``group_blocks.py`` by rounding to nearest: what algorithms must beat.

Scales span each group's range. numpy only.
"""

from __future__ import annotations

import numpy as np

from pelton.dtypes import BLOCK_TYPES
from pelton.ir.group_blocks import (
    _CODEBOOK,
    DTYPES,
    E2M1,
    E4M3,
    E4M3_MAX,
    Float32,
    UInt8,
    bits_of,
    from_codes,
    group_of,
    pack_bits,
    to_e4m3,
)
from pelton.ir.tensors import HostTensor


def encode(x: Float32, quant: str, *, symmetric: bool = False) -> HostTensor:
    """``x``, (rows, cols) finite float32, as ``quant``; cols a whole number of its groups.

    ``symmetric``: the zero point of an ``int<n>_g<size>`` type is the middle code (the others have none).
    """
    rows, cols = x.shape
    grouped = np.ascontiguousarray(x, np.float32).reshape(rows, -1, group_of(quant) or cols)
    if quant == "nvfp4":
        return _nvfp4(grouped)
    if quant == "mxfp4":
        return _mxfp4(grouped)
    if quant.startswith("int") and quant != "int8_row":
        d, z = integer_scales(grouped, bits_of(quant), symmetric=symmetric)
        return from_codes(quant, integer_codes(grouped, d, z, bits_of(quant)).reshape(rows, cols), d, z)
    top = np.abs(grouped).max(axis=-1)
    if quant == "int8_row":
        d = top / np.float32(127)
        q = np.clip(np.rint(_divide(grouped, d)), -127, 127).astype(np.int8).view(np.uint8)
    elif quant.startswith("fp8"):
        d = top / np.float32(E4M3_MAX)
        q = to_e4m3(_divide(grouped, d))
    else:
        book = _CODEBOOK[quant]
        d = top / book.max()
        q = nearest(_divide(grouped, d), book)
    return from_codes(quant, q.reshape(rows, cols), d)


def integer_scales(grouped: Float32, bits: int, *, symmetric: bool) -> tuple[Float32, UInt8]:
    """(..., g) values -> scales and zero points (...) of the unsigned ``bits``-bit codes that span them.

    Asymmetric: d = (max - min) / (2^bits - 1) over a range that holds 0, z = round(-min / d). Symmetric:
    d = max|x| / (2^(bits-1) - 1/2), z = 2^(bits-1), so that both ends miss by half a step. Scales are
    float16 values (float32 of 8-bit codes); a group of zeros has scale 0.
    """
    if symmetric:
        d = np.abs(grouped).max(axis=-1) / np.float32(2 ** (bits - 1) - 0.5)
        d = _stored(d, bits)
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


def _stored(d: Float32, bits: int) -> Float32:
    """The scale that a decoder will read: codes are chosen for that one."""
    if bits == 8:
        return d
    rounded = d.astype(np.float16)
    assert np.isfinite(rounded).all(), "a group's scale does not fit in float16"
    return rounded.astype(np.float32)


def _divide(grouped: Float32, d: Float32) -> Float32:
    """Values over their group's scale; 0 where that is 0."""
    safe = np.where(d == 0, np.float32(1), d)[..., None]
    return np.where(d[..., None] == 0, np.float32(0), grouped / safe).astype(np.float32)


def _packed(quant: str, header: Float32 | None, s: UInt8, q: UInt8) -> HostTensor:
    rows, groups, size = q.shape
    block = BLOCK_TYPES[quant]
    body = np.empty((rows, groups), DTYPES[quant])
    body["s"], body["qs"] = s, pack_bits(q, 4)
    out = np.empty((rows, block.row_bytes(groups * size)), np.uint8)
    if header is not None:
        out[:, : block.header] = np.ascontiguousarray(header, "<f4").view(np.uint8)
    out[:, block.header :] = body.view(np.uint8).reshape(rows, -1)
    return HostTensor(quant, (rows, groups * size), out)


def _nvfp4(grouped: Float32) -> HostTensor:
    """One scale for the tensor, max|x| / (6 * 448), and e4m3 ones for 16 values (NVIDIA's NVFP4 recipe)."""
    top = np.abs(grouped).max(axis=-1)
    tensor = np.float32(top.max() / (E2M1.max() * E4M3_MAX))
    tensor = tensor if tensor > 0 else np.float32(1)
    s = to_e4m3(top / E2M1.max() / tensor)
    q = nearest(_divide(grouped, tensor * E4M3[s]), E2M1)
    return _packed("nvfp4", np.full((len(grouped), 1), tensor, np.float32), s, q)


def _mxfp4(grouped: Float32) -> HostTensor:
    """Scale 2^(floor(log2 max|x|) - 2): OCP Microscaling formats 1.0, section 6.3."""
    top = np.abs(grouped).max(axis=-1)
    _, exponent = np.frexp(top)
    s = np.where(top == 0, 0, np.clip(exponent - 1 - 2 + 127, 0, 254)).astype(np.uint8)
    d = np.exp2(s.astype(np.float32) - 127)
    return _packed("mxfp4", None, s, nearest(_divide(grouped, np.where(top == 0, 0, d)), E2M1))
