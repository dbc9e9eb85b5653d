"""GGUF's block types in numpy: rows of blocks to float32 and back, for native types.

The definition that layouts and kernels are held to. Dequantising follows the GGUF specification
operation by operation, so its float32 values are the reference ones bit for bit. Quantising is plain
rounding (no search for better scales): good for tests and for repacking, not a quantisation algorithm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from pelton.dtypes import BLOCK_TYPES
from pelton.errors import ConfigError

Array = npt.NDArray[Any]
UInt8 = npt.NDArray[np.uint8]
Float32 = npt.NDArray[np.float32]

#: The bytes of one block, field by field (little endian). ``qs``: in 4-bit types of 32 values, byte j holds
#: value j in its low and value j + 16 in its high nibble.
BLOCK_DTYPES: dict[str, np.dtype[Any]] = {
    "q4_0": np.dtype([("d", "<u2"), ("qs", "u1", 16)]),
    "q4_1": np.dtype([("d", "<u2"), ("m", "<u2"), ("qs", "u1", 16)]),
    "q5_0": np.dtype([("d", "<u2"), ("qh", "u1", 4), ("qs", "u1", 16)]),
    "q8_0": np.dtype([("d", "<u2"), ("qs", "i1", 32)]),
    "q4_k": np.dtype([("d", "<u2"), ("dmin", "<u2"), ("scales", "u1", 12), ("qs", "u1", 128)]),
    "q6_k": np.dtype([("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), ("d", "<u2")]),
}


def blocks_view(raw: Array, quant: str) -> Array:
    """``raw``: (rows, bytes) -> (rows, blocks) of ``BLOCK_DTYPES[quant]``, sharing memory.

    Raises ``ConfigError`` for a block type without native support.
    """
    if quant not in BLOCK_DTYPES:
        known = ", ".join(BLOCK_DTYPES)
        raise ConfigError(f"block type {quant!r} has no native layout (known: {known}); repack it first")
    assert BLOCK_DTYPES[quant].itemsize == BLOCK_TYPES[quant].block_bytes
    return np.ascontiguousarray(raw).view(BLOCK_DTYPES[quant])


def half(bits: Array) -> Array:
    """float16 bit patterns as float32."""
    return np.ascontiguousarray(bits).view(np.float16).astype(np.float32)


def to_half(values: Array) -> npt.NDArray[np.uint16]:
    """float32 rounded to float16, as bit patterns."""
    return values.astype(np.float16).view(np.uint16)


def nibbles(packed: Array) -> Array:
    """(..., n) bytes -> (..., 2n): the low nibbles, then the high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def pack_nibbles(values: Array) -> Array:
    """Inverse of ``nibbles``."""
    n = values.shape[-1] // 2
    packed: Array = values[..., :n] | values[..., n:] << 4
    return packed


def fifth_bits(qh: Array) -> Array:
    """q5_0's ``qh`` (..., 4) -> (..., 32) of 0 or 1."""
    return np.unpackbits(qh, axis=-1, bitorder="little")


def q4_k_scales(packed: Array) -> tuple[Array, Array]:
    """(..., 12) -> 6-bit scales and minimums, (..., 8) each."""
    a, b, c = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = np.concatenate([a & 63, (c & 15) | (a >> 6) << 4], axis=-1)
    mins = np.concatenate([b & 63, (c >> 4) | (b >> 6) << 4], axis=-1)
    return scales, mins


def pack_q4_k_scales(scales: Array, mins: Array) -> Array:
    """Inverse of ``q4_k_scales``."""
    a = scales[..., :4] | (scales[..., 4:] >> 4) << 6
    b = mins[..., :4] | (mins[..., 4:] >> 4) << 6
    c = (scales[..., 4:] & 15) | (mins[..., 4:] & 15) << 4
    return np.concatenate([a, b, c], axis=-1)


def q4_k_values(qs: Array) -> Array:
    """(..., 128) -> (..., 8, 32): each 32 bytes hold two sub-blocks, low then high nibbles."""
    chunks = qs.reshape(*qs.shape[:-1], 4, 32)
    return np.stack([chunks & 15, chunks >> 4], axis=-2).reshape(*qs.shape[:-1], 8, 32)


def pack_q4_k_values(values: Array) -> Array:
    """Inverse of ``q4_k_values``."""
    pairs = values.reshape(*values.shape[:-2], 4, 2, 32)
    packed: Array = pairs[..., 0, :] | pairs[..., 1, :] << 4
    return packed.reshape(*values.shape[:-2], 128)


def q6_k_values(ql: Array, qh: Array) -> Array:
    """(..., 128) and (..., 64) -> (..., 8, 32) of 0 to 63 (offset 32)."""
    lead = ql.shape[:-1]
    low = ql.reshape(*lead, 2, 2, 32)
    low = np.concatenate([low & 15, low >> 4], axis=-2)  # (..., 2, 4, 32)
    shift = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = qh.reshape(*lead, 2, 1, 32) >> shift & 3
    values: Array = low | high << 4
    return values.reshape(*lead, 8, 32)


def pack_q6_k_values(values: Array) -> tuple[Array, Array]:
    """Inverse of ``q6_k_values``."""
    lead = values.shape[:-2]
    v = values.reshape(*lead, 2, 4, 32)
    low = (v[..., :2, :] & 15) | (v[..., 2:, :] & 15) << 4
    shift = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = np.bitwise_or.reduce(v >> 4 << shift, axis=-2)
    return low.reshape(*lead, 128), high.reshape(*lead, 64)


def dequantize_rows(raw: UInt8, quant: str) -> Float32:
    """``raw``: (rows, bytes) of GGUF blocks -> (rows, cols) float32, exactly the values it stands for."""
    b = blocks_view(raw, quant)
    d = half(b["d"])[..., None]
    if quant == "q8_0":
        values = d * b["qs"]
    elif quant == "q4_0":
        values = d * (nibbles(b["qs"]).astype(np.int8) - 8)
    elif quant == "q4_1":
        values = d * nibbles(b["qs"]) + half(b["m"])[..., None]
    elif quant == "q5_0":
        values = d * ((nibbles(b["qs"]) | fifth_bits(b["qh"]) << 4).astype(np.int8) - 16)
    elif quant == "q4_k":
        scales, mins = q4_k_scales(b["scales"])
        scaled = (d * scales)[..., None] * q4_k_values(b["qs"])
        values = scaled - (half(b["dmin"])[..., None] * mins)[..., None]
    else:
        q = q6_k_values(b["ql"], b["qh"]).astype(np.int8) - 32
        values = (d * b["scales"])[..., None] * q.reshape(*b.shape, 16, 16)
    result: Float32 = values.astype(np.float32, copy=False).reshape(raw.shape[0], -1)
    return result


def _inverse(d: Array) -> Array:
    return np.divide(1.0, d, out=np.zeros_like(d), where=d != 0).astype(np.float32)


def _round(values: Array, low: int, high: int) -> npt.NDArray[np.int32]:
    return np.clip(np.rint(values), low, high).astype(np.int32)


def _quantize_32(x: Array, quant: str, out: Array) -> None:
    if quant == "q4_1":
        low = x.min(-1)
        d = half(to_half((x.max(-1) - low) / 15))
        out["d"], out["m"] = to_half(d), to_half(low)
        q = _round((x - half(out["m"])[..., None]) * _inverse(d)[..., None], 0, 15)
        out["qs"] = pack_nibbles(q.astype(np.uint8))
        return
    top = {"q4_0": 8, "q5_0": 16, "q8_0": 127}[quant]
    extreme = np.take_along_axis(x, np.abs(x).argmax(-1)[..., None], -1)[..., 0]
    d = half(to_half(extreme / (127 if quant == "q8_0" else -top)))
    out["d"] = to_half(d)
    q = _round(x * _inverse(d)[..., None], -top, top if quant == "q8_0" else top - 1)
    if quant == "q8_0":
        out["qs"] = q
        return
    u = (q + top).astype(np.uint8)
    out["qs"] = pack_nibbles(u & 15)
    if quant == "q5_0":
        out["qh"] = np.packbits(u >> 4, axis=-1, bitorder="little")


def _quantize_q4_k(x: Array, out: Array) -> None:
    sub = x.reshape(*x.shape[:-1], 8, 32)
    low = np.minimum(sub.min(-1), 0)
    step = (sub.max(-1) - low) / 15
    d, dmin = half(to_half(step.max(-1) / 63)), half(to_half(-low.min(-1) / 63))
    out["d"], out["dmin"] = to_half(d), to_half(dmin)
    scales = _round(step * _inverse(d)[..., None], 0, 63).astype(np.uint8)
    mins = _round(-low * _inverse(dmin)[..., None], 0, 63).astype(np.uint8)
    out["scales"] = pack_q4_k_scales(scales, mins)
    offset = (dmin[..., None] * mins)[..., None]
    q = _round((sub + offset) * _inverse(d[..., None] * scales)[..., None], 0, 15)
    out["qs"] = pack_q4_k_values(q.astype(np.uint8))


def _quantize_q6_k(x: Array, out: Array) -> None:
    sub = x.reshape(*x.shape[:-1], 16, 16)
    step = np.abs(sub).max(-1) / 31
    d = half(to_half(step.max(-1) / 127))
    out["d"] = to_half(d)
    out["scales"] = _round(step * _inverse(d)[..., None], 0, 127)
    q = _round(sub * _inverse(d[..., None] * out["scales"])[..., None], -32, 31)
    out["ql"], out["qh"] = pack_q6_k_values((q + 32).astype(np.uint8).reshape(*x.shape[:-1], 8, 32))


def quantize_rows(values: Float32, quant: str) -> UInt8:
    """``values``: (rows, cols) float32, cols a multiple of the block size -> (rows, bytes) of blocks."""
    rows, cols = values.shape
    size = BLOCK_TYPES[quant].block_size
    assert cols % size == 0, f"{cols} columns do not divide into {quant} blocks of {size}"
    x = np.ascontiguousarray(values, np.float32).reshape(rows, cols // size, size)
    raw = np.zeros((rows, cols // size * BLOCK_TYPES[quant].block_bytes), np.uint8)
    out = blocks_view(raw, quant)
    encode: dict[str, Callable[[Float32, Array], None]] = {"q4_k": _quantize_q4_k, "q6_k": _quantize_q6_k}
    if quant in encode:
        encode[quant](x, out)
    else:
        _quantize_32(x, quant, out)
    return raw
