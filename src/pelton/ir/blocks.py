"""Block types: how a row divides into blocks, and of GGUF's types the fields of a block, how codes are packed
in them, and the values they stand for (``group_blocks.py`` has the other types).

The definition that readers, layouts and kernels are held to; ``block_encoder.py`` is the way back. The
byte layouts are ggml's (``ggml-common.h``) and decoded values equal ggml's bit for bit: float32
arithmetic in the same order. ``d``, ``m`` and ``dmin`` are float16. numpy only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from pelton.dtypes import BLOCK_TYPES
from pelton.ir import group_blocks
from pelton.ir.tensors import HostTensor, bf16_to_f32

Array = npt.NDArray[Any]
UInt8 = npt.NDArray[np.uint8]
Float32 = npt.NDArray[np.float32]

#: The bytes of one block, field by field (little endian). ``qs``: in 4-bit types of 32 values, byte j holds
#: value j in its low and value j + 16 in its high nibble.
BLOCK_DTYPES: dict[str, np.dtype[Any]] = {
    "q4_0": np.dtype([("d", "<u2"), ("qs", "u1", 16)]),
    "q4_1": np.dtype([("d", "<u2"), ("m", "<u2"), ("qs", "u1", 16)]),
    "q5_0": np.dtype([("d", "<u2"), ("qh", "u1", 4), ("qs", "u1", 16)]),
    "q5_1": np.dtype([("d", "<u2"), ("m", "<u2"), ("qh", "u1", 4), ("qs", "u1", 16)]),
    "q8_0": np.dtype([("d", "<u2"), ("qs", "i1", 32)]),
    "q2_k": np.dtype([("scales", "u1", 16), ("qs", "u1", 64), ("d", "<u2"), ("dmin", "<u2")]),
    "q3_k": np.dtype([("qh", "u1", 32), ("qs", "u1", 64), ("scales", "u1", 12), ("d", "<u2")]),
    "q4_k": np.dtype([("d", "<u2"), ("dmin", "<u2"), ("scales", "u1", 12), ("qs", "u1", 128)]),
    "q5_k": np.dtype(
        [("d", "<u2"), ("dmin", "<u2"), ("scales", "u1", 12), ("qh", "u1", 32), ("qs", "u1", 128)]
    ),
    "q6_k": np.dtype([("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), ("d", "<u2")]),
    **group_blocks.DTYPES,
}

#: Values handled at a time, so that temporaries stay a few MB whatever the tensor's size.
_CHUNK_VALUES = 1 << 20


def blocks_view(raw: Array, quant: str) -> Array:
    """``raw``: (rows, bytes), without a row's header -> (rows, blocks) of ``BLOCK_DTYPES[quant]``.

    Shares memory where the rows lie one after another.
    """
    assert BLOCK_DTYPES[quant].itemsize == BLOCK_TYPES[quant].block_bytes
    return np.ascontiguousarray(raw).view(BLOCK_DTYPES[quant])


def scales(raw: Array, quant: str) -> Iterator[Float32]:
    """``raw``: (rows, bytes) of a block type -> every float scale in it, kind by kind: for checks."""
    if quant in group_blocks.DTYPES:
        yield group_blocks.scales(raw, quant)
        return
    fields = blocks_view(raw, quant)
    for name in ("d", "m", "dmin"):
        if name in (fields.dtype.names or ()):
            yield half(fields[name])


def row_chunks(rows: int, cols: int) -> Iterator[slice]:
    """Slices of rows, each about a million values."""
    step = max(1, _CHUNK_VALUES // max(cols, 1))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def dequantize(tensor: HostTensor) -> Float32:
    """``tensor``'s values as a new float32 array of its logical shape; dense ones are converted."""
    if tensor.quant == "bfloat16":
        return bf16_to_f32(tensor.data)
    if tensor.dense:
        return tensor.data.astype(np.float32)
    return dequantize_rows(tensor.data.view(np.uint8), tensor.quant)


def dequantize_rows(raw: UInt8, quant: str) -> Float32:
    """``raw``: (rows, bytes) of blocks -> (rows, cols) float32, exactly the values it stands for."""
    block = BLOCK_TYPES[quant]
    cols = (raw.shape[1] - block.header) // block.block_bytes * block.block_size
    out = np.empty((len(raw), cols), np.float32)
    for part in row_chunks(*out.shape):
        if quant in group_blocks.DTYPES:
            out[part] = group_blocks.decode(raw[part], quant)
        else:
            out[part] = _DECODE[quant](blocks_view(raw[part], quant)).reshape(-1, cols)
    return out


# --- how codes are packed: the last axis is one block's field -------------------------------------

_TWO_BITS = np.array([0, 2, 4, 6], np.uint8)[:, None]
_PLANES = np.arange(8, dtype=np.uint8)[:, None]


def half(bits: Array) -> Array:
    """float16 bit patterns as float32."""
    return np.ascontiguousarray(bits).view(np.float16).astype(np.float32)


def nibbles(packed: Array) -> Array:
    """(..., n) bytes -> (..., 2n): the low nibbles, then the high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def pack_nibbles(values: Array) -> Array:
    """Inverse of ``nibbles``."""
    n = values.shape[-1] // 2
    packed: Array = values[..., :n] | values[..., n:] << 4
    return packed


def fifth_bits(qh: Array) -> Array:
    """``qh`` of q5_0 and q5_1, (..., 4) -> (..., 32) of 0 or 1: bit i belongs to value i."""
    return np.unpackbits(qh, axis=-1, bitorder="little")


def bit_planes(packed: Array) -> Array:
    """(..., 32) -> (..., 8, 32) of 0 or 1: bit j belongs to sub-block j."""
    planes: Array = packed[..., None, :] >> _PLANES & 1
    return planes


def pack_bit_planes(planes: Array) -> Array:
    """Inverse of ``bit_planes``."""
    packed: Array = np.bitwise_or.reduce(planes << _PLANES, axis=-2)
    return packed


def two_bits(packed: Array) -> Array:
    """(..., 64) -> (..., 8, 32) of 0 to 3: each 32 bytes hold four sub-blocks, lowest bits first."""
    lead = packed.shape[:-1]
    values: Array = packed.reshape(*lead, 2, 1, 32) >> _TWO_BITS & 3
    return values.reshape(*lead, 8, 32)


def pack_two_bits(values: Array) -> Array:
    """Inverse of ``two_bits``."""
    lead = values.shape[:-2]
    shifted = values.reshape(*lead, 2, 4, 32) << _TWO_BITS
    packed: Array = np.bitwise_or.reduce(shifted, axis=-2)
    return packed.reshape(*lead, 64)


def q4_k_scales(packed: Array) -> tuple[Array, Array]:
    """(..., 12) of q4_k and q5_k -> 6-bit scales and minimums, (..., 8) each."""
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


def q3_k_scales(packed: Array) -> Array:
    """(..., 12) -> (..., 16) int8: low nibbles in the first 8 bytes, upper two bits in the other 4."""
    high = (packed[..., None, 8:] >> _TWO_BITS & 3).reshape(*packed.shape[:-1], 16)
    scales: Array = (nibbles(packed[..., :8]) | high << 4).astype(np.int8) - np.int8(32)
    return scales


def pack_q3_k_scales(scales: Array) -> Array:
    """Inverse of ``q3_k_scales``."""
    codes = (scales + np.int8(32)).view(np.uint8)
    high = (codes >> 4).reshape(*codes.shape[:-1], 4, 4) << _TWO_BITS
    return np.concatenate([pack_nibbles(codes & 15), np.bitwise_or.reduce(high, axis=-2)], axis=-1)


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
    halves = ql.reshape(*lead, 2, 2, 32)
    low = np.concatenate([halves & 15, halves >> 4], axis=-2).reshape(*lead, 8, 32)
    values: Array = low | two_bits(qh) << 4
    return values


def pack_q6_k_values(values: Array) -> tuple[Array, Array]:
    """Inverse of ``q6_k_values``."""
    lead = values.shape[:-2]
    v = values.reshape(*lead, 2, 4, 32)
    low = (v[..., :2, :] & 15) | (v[..., 2:, :] & 15) << 4
    return low.reshape(*lead, 128), pack_two_bits(values >> 4)


# --- values of blocks: (rows, blocks) of the type's fields -> (rows, blocks, ...) float32 ---------


def _scale(b: Array, field: str = "d") -> Any:
    """(rows, blocks, 1) float32."""
    return half(b[field])[..., None]


def _q4_0(b: Array) -> Any:
    return _scale(b) * (nibbles(b["qs"]).astype(np.int8) - np.int8(8))


def _q4_1(b: Array) -> Any:
    return _scale(b) * nibbles(b["qs"]) + _scale(b, "m")


def _q5_0(b: Array) -> Any:
    return _scale(b) * ((nibbles(b["qs"]) | fifth_bits(b["qh"]) << 4).astype(np.int8) - np.int8(16))


def _q5_1(b: Array) -> Any:
    return _scale(b) * (nibbles(b["qs"]) | fifth_bits(b["qh"]) << 4) + _scale(b, "m")


def _q8_0(b: Array) -> Any:
    return _scale(b) * b["qs"]


def _q2_k(b: Array) -> Any:  # 16 sub-blocks of 16; scale and minimum are a byte's nibbles
    scales, mins = _scale(b) * (b["scales"] & 15), _scale(b, "dmin") * (b["scales"] >> 4)
    return scales[..., None] * two_bits(b["qs"]).reshape(*b.shape, 16, 16) - mins[..., None]


def _q3_k(b: Array) -> Any:  # 16 sub-blocks of 16; a clear third bit subtracts 4
    q = two_bits(b["qs"]).astype(np.int8) - ((bit_planes(b["qh"]) ^ 1).astype(np.int8) << 2)
    return (_scale(b) * q3_k_scales(b["scales"]))[..., None] * q.reshape(*b.shape, 16, 16)


def _q4_k(b: Array) -> Any:
    return _scales_and_mins(b, q4_k_values(b["qs"]))


def _q5_k(b: Array) -> Any:
    return _scales_and_mins(b, q4_k_values(b["qs"]) | bit_planes(b["qh"]) << 4)


def _scales_and_mins(b: Array, q: Array) -> Any:  # 8 sub-blocks of 32
    scales, mins = q4_k_scales(b["scales"])
    return (_scale(b) * scales)[..., None] * q - (_scale(b, "dmin") * mins)[..., None]


def _q6_k(b: Array) -> Any:  # 16 sub-blocks of 16
    q = q6_k_values(b["ql"], b["qh"]).astype(np.int8) - np.int8(32)
    return (_scale(b) * b["scales"])[..., None] * q.reshape(*b.shape, 16, 16)


_DECODE: dict[str, Callable[[Array], Any]] = {
    "q4_0": _q4_0,
    "q4_1": _q4_1,
    "q5_0": _q5_0,
    "q5_1": _q5_1,
    "q8_0": _q8_0,
    "q2_k": _q2_k,
    "q3_k": _q3_k,
    "q4_k": _q4_k,
    "q5_k": _q5_k,
    "q6_k": _q6_k,
}
