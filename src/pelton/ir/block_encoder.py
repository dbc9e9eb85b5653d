"""Encode values as blocks by plain rounding: GGUF's types and those of ``group_blocks``.

No search for better scales: what repacking and tests need, not a quantisation algorithm. numpy only.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from pelton.dtypes import BLOCK_TYPES, GROUP_BLOCK_TYPES
from pelton.ir import blocks, group_encoder
from pelton.ir.blocks import Array, Float32
from pelton.ir.group_encoder import to_half
from pelton.ir.tensors import HostTensor


def quantize(x: Float32, quant: str) -> HostTensor:
    """``x``, (rows, cols) float32, encoded as ``quant``.

    Scales cover each block's range and values are rounded to the nearest code, so the error of a
    value is at most about half a step (more where a block's values are so small, below 1e-3 for
    q6_k, that its float16 scale is subnormal). Rows must be a whole number of blocks, values finite.
    """
    block = BLOCK_TYPES[quant]
    rows, cols = x.shape
    assert cols % block.block_size == 0, f"{cols} columns are no multiple of {quant}'s {block.block_size}"
    assert np.isfinite(x).all(), "non-finite values cannot be quantised"
    if quant in GROUP_BLOCK_TYPES:
        return group_encoder.encode(x, quant)
    encode = _ENCODE[quant]
    out = np.empty((rows, block.row_bytes(cols)), np.uint8)
    fields = blocks.blocks_view(out, quant)
    for part in blocks.row_chunks(rows, cols):
        values = np.ascontiguousarray(x[part], np.float32)
        encode(values.reshape(len(values), -1, block.block_size), fields[part])
    return HostTensor(quant, (rows, cols), out)


# --- pieces: scales keep the last axis, as 1 ------------------------------------------------------


def _half(values: Array) -> npt.NDArray[np.uint16]:
    """(..., 1) float32 rounded to float16 -> (...) bit patterns."""
    return to_half(values[..., 0]).view(np.uint16)


def _stored(values: Array) -> Array:
    """What a decoder will read: codes are chosen for the rounded scale, not the exact one."""
    return values.astype(np.float16).astype(np.float32)


def _codes(x: Array, step: Array, low: int, high: int) -> npt.NDArray[np.int8]:
    """``x / step`` rounded and clipped; 0 where the step is 0."""
    safe = np.where(step == 0, np.float32(1), step)
    q = np.where(step == 0, np.float32(0), x / safe)
    return np.clip(np.rint(q), low, high).astype(np.int8)


def _signed_peak(x: Array) -> Array:
    """The value of largest magnitude along the last axis, kept as an axis."""
    at = np.abs(x).argmax(axis=-1)[..., None]
    return np.take_along_axis(x, at, axis=-1)


# --- (rows, blocks, block_size) float32 into (rows, blocks) of the type's fields ------------------


def _q4_0(x: Array, out: Array) -> None:
    d = _signed_peak(x) / np.float32(-8)  # the peak takes code 0 = -8, the side with one more step
    out["d"] = _half(d)
    out["qs"] = blocks.pack_nibbles((_codes(x, _stored(d), -8, 7) + np.int8(8)).view(np.uint8))


def _q4_1(x: Array, out: Array) -> None:
    out["qs"] = blocks.pack_nibbles(_with_offset(x, 15, out))


def _q5_1(x: Array, out: Array) -> None:
    q = _with_offset(x, 31, out)
    out["qh"] = np.packbits(q >> 4, axis=-1, bitorder="little")
    out["qs"] = blocks.pack_nibbles(q & 15)


def _with_offset(x: Array, most: int, out: Array) -> Array:
    """Codes up to ``most``; scale and offset go into ``out``."""
    m = x.min(axis=-1, keepdims=True)
    d = (x.max(axis=-1, keepdims=True) - m) / np.float32(most)
    out["d"], out["m"] = _half(d), _half(m)
    return _codes(x - _stored(m), _stored(d), 0, most).view(np.uint8)


def _q5_0(x: Array, out: Array) -> None:
    d = _signed_peak(x) / np.float32(-16)
    q = (_codes(x, _stored(d), -16, 15) + np.int8(16)).view(np.uint8)
    out["d"] = _half(d)
    out["qh"] = np.packbits(q >> 4, axis=-1, bitorder="little")
    out["qs"] = blocks.pack_nibbles(q & 15)


def _q8_0(x: Array, out: Array) -> None:
    d = np.abs(x).max(axis=-1, keepdims=True) / np.float32(127)
    out["d"], out["qs"] = _half(d), _codes(x, _stored(d), -127, 127)


def _q2_k(x: Array, out: Array) -> None:
    q, scales, mins = _with_minimums(x.reshape(*x.shape[:-1], 16, 16), 3, 15, out)
    out["scales"], out["qs"] = scales | mins << 4, blocks.pack_two_bits(q.reshape(*x.shape[:-1], 8, 32))


def _q4_k(x: Array, out: Array) -> None:
    q, scales, mins = _with_minimums(x.reshape(*x.shape[:-1], 8, 32), 15, 63, out)
    out["scales"], out["qs"] = blocks.pack_q4_k_scales(scales, mins), blocks.pack_q4_k_values(q)


def _q5_k(x: Array, out: Array) -> None:
    q, scales, mins = _with_minimums(x.reshape(*x.shape[:-1], 8, 32), 31, 63, out)
    out["scales"], out["qs"] = blocks.pack_q4_k_scales(scales, mins), blocks.pack_q4_k_values(q & 15)
    out["qh"] = blocks.pack_bit_planes(q >> 4)


def _with_minimums(sub: Array, most: int, largest: int, out: Array) -> tuple[Array, Array, Array]:
    """Codes up to ``most`` of sub-blocks, and scales and minimums, integers up to ``largest`` times what goes
    into ``out``."""
    low = np.minimum(sub.min(axis=-1), 0)
    step = (sub.max(axis=-1) - low) / np.float32(most)
    d = step.max(axis=-1, keepdims=True) / np.float32(largest)
    dmin = (-low).max(axis=-1, keepdims=True) / np.float32(largest)
    scales = _codes(step, _stored(d), 0, largest).view(np.uint8)
    mins = _codes(-low, _stored(dmin), 0, largest).view(np.uint8)
    offset = (_stored(dmin) * mins)[..., None]
    out["d"], out["dmin"] = _half(d), _half(dmin)
    return _codes(sub + offset, (_stored(d) * scales)[..., None], 0, most).view(np.uint8), scales, mins


def _q3_k(x: Array, out: Array) -> None:
    q, scales = _with_signed_scales(x, 4, 32, out)
    values = q.reshape(*x.shape[:-1], 8, 32)
    out["scales"], out["qs"] = blocks.pack_q3_k_scales(scales), blocks.pack_two_bits(values & 3)
    out["qh"] = blocks.pack_bit_planes(values >> 2)


def _q6_k(x: Array, out: Array) -> None:
    q, out["scales"] = _with_signed_scales(x, 32, 128, out)
    out["ql"], out["qh"] = blocks.pack_q6_k_values(q.reshape(*x.shape[:-1], 8, 32))


def _with_signed_scales(x: Array, middle: int, largest: int, out: Array) -> tuple[Array, Array]:
    """Codes around ``middle`` of sub-blocks of 16, and int8 scales from -``largest`` on."""
    sub = x.reshape(*x.shape[:-1], 16, 16)
    step = _signed_peak(sub)[..., 0] / np.float32(-middle)
    d = _signed_peak(step) / np.float32(-largest)
    scales = _codes(step, _stored(d), -largest, largest - 1)
    q = _codes(sub, (_stored(d) * scales)[..., None], -middle, middle - 1) + np.int8(middle)
    out["d"] = _half(d)
    return q.view(np.uint8), scales


_ENCODE: dict[str, Callable[[Array, Array], None]] = {
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

#: GGUF types that ``quantize`` makes.
ENCODED = tuple(_ENCODE)
