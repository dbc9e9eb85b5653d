"""Block-quantised values in GGUF's layouts: dequantise, quantise, repack. numpy only.

A block of ``block_size`` values shares scales; the byte layouts are ggml's (``ggml-common.h``), as
documented beside each type below. ``d``, ``m`` and ``dmin`` are float16, nibbles are stored low
first. Dequantised values equal ggml's bit for bit: float32 arithmetic in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from pelton.dtypes import BLOCK_TYPES, NATIVE_BLOCK_TYPES
from pelton.ir.tensors import HostTensor, bf16_to_f32, f32_to_bf16

__all__ = ["bf16_to_f32", "dequantize", "f32_to_bf16", "quantize", "repack"]

Bytes = npt.NDArray[np.uint8]
Float32 = npt.NDArray[np.float32]

#: Values handled at a time, so that temporaries stay a few MB whatever the tensor's size.
_CHUNK_VALUES = 1 << 20


def dequantize(tensor: HostTensor) -> Float32:
    """``tensor``'s values as a new float32 array of its logical shape."""
    if tensor.quant == "bfloat16":
        return bf16_to_f32(tensor.data)
    if tensor.dense:
        return tensor.data.astype(np.float32)
    block = BLOCK_TYPES[tensor.quant]
    rows, cols = tensor.shape
    decode = _DECODE[tensor.quant]
    out = np.empty((rows, cols), np.float32)
    for part in _row_chunks(rows, cols):
        blocks = np.ascontiguousarray(tensor.data[part], np.uint8).reshape(-1, block.block_bytes)
        out[part] = decode(blocks).reshape(-1, cols)
    return out


def quantize(x: Float32, quant: str) -> HostTensor:
    """``x``, (rows, cols) float32, encoded as ``quant``: one of the native block types.

    Scales cover each block's range and values are rounded to the nearest code, so the error of a
    value is at most about half a step (more where a block's values are so small, below 1e-3 for
    q6_k, that its float16 scale is subnormal). Rows must be a whole number of blocks, values finite.
    """
    block = BLOCK_TYPES[quant]
    rows, cols = x.shape
    assert cols % block.block_size == 0, f"{cols} columns are no multiple of {quant}'s {block.block_size}"
    assert np.isfinite(x).all(), "non-finite values cannot be quantised"
    encode = _ENCODE[quant]
    out = np.empty((rows, cols // block.block_size * block.block_bytes), np.uint8)
    for part in _row_chunks(rows, cols):
        blocks = np.ascontiguousarray(x[part], np.float32).reshape(-1, block.block_size)
        out[part] = encode(blocks).reshape(-1, out.shape[1])
    return HostTensor(quant, (rows, cols), out)


def repack(tensor: HostTensor) -> tuple[HostTensor, str]:
    """``tensor`` in a type with native kernels, and a sentence on what was done ("" if nothing).

    Block types without them are requantised to q8_0, and the relative error (root of summed squares) is
    measured and reported.
    """
    if tensor.dense or tensor.quant in NATIVE_BLOCK_TYPES:
        return tensor, ""
    rows, cols = tensor.shape
    q8_0 = BLOCK_TYPES["q8_0"]
    packed = np.empty((rows, cols // q8_0.block_size * q8_0.block_bytes), np.uint8)
    error = total = 0.0
    for part in _row_chunks(rows, cols):
        piece = HostTensor(tensor.quant, (part.stop - part.start, cols), tensor.data[part])
        values = dequantize(piece)
        encoded = quantize(values, "q8_0")
        packed[part] = encoded.data
        error += float(np.square(dequantize(encoded) - values, dtype=np.float64).sum())
        total += float(np.square(values, dtype=np.float64).sum())
    result = HostTensor("q8_0", (rows, cols), packed)
    relative = (error / total) ** 0.5 if total else 0.0
    return result, f"{tensor.quant} repacked as q8_0, relative error {relative:.1e}"


def _row_chunks(rows: int, cols: int) -> Iterator[slice]:
    step = max(1, _CHUNK_VALUES // max(cols, 1))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


# --- pieces of blocks: n blocks along axis 0 ------------------------------------------------------


def _f16(blocks: Bytes, at: int) -> Float32:
    """The float16 at byte ``at`` of every block, (n, 1) float32."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """(n, k) bytes -> (n, 2k): all low nibbles, then all high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=1, dtype=np.uint8)


def _fifth_bits(blocks: Bytes, at: int) -> Bytes:
    """The 32 bits at byte ``at``, each as 0 or 16: bit i belongs to value i."""
    return np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") << np.uint8(4)


def _k_scales(blocks: Bytes, at: int) -> tuple[Float32, Float32]:
    """q4_k's and q5_k's 12 bytes of packed 6-bit scales and mins, each (n, 8, 1) float32."""
    s = blocks[:, at : at + 12]
    low, high, rest = s[:, :4], s[:, 4:8], s[:, 8:]
    scales = np.concatenate([low & 63, (rest & 15) | ((low >> 6) << 4)], axis=1)
    mins = np.concatenate([high & 63, (rest >> 4) | ((high >> 6) << 4)], axis=1)
    return scales[..., None].astype(np.float32), mins[..., None].astype(np.float32)


# --- dequantise: (n, block_bytes) uint8 -> (n, block_size) float32 --------------------------------


def _q4_0(b: Bytes) -> Float32:  # d, 16 bytes of nibbles: (q - 8) d
    return _f16(b, 0) * (_nibbles(b[:, 2:]).astype(np.int8) - np.int8(8)).astype(np.float32)


def _q4_1(b: Bytes) -> Float32:  # d, m, nibbles: q d + m
    return _f16(b, 0) * _nibbles(b[:, 4:]).astype(np.float32) + _f16(b, 2)


def _q5_0(b: Bytes) -> Float32:  # d, 32 fifth bits, nibbles: (q - 16) d
    q = (_nibbles(b[:, 6:]) | _fifth_bits(b, 2)).astype(np.int8) - np.int8(16)
    return _f16(b, 0) * q.astype(np.float32)


def _q5_1(b: Bytes) -> Float32:  # d, m, 32 fifth bits, nibbles: q d + m
    q = _nibbles(b[:, 8:]) | _fifth_bits(b, 4)
    return _f16(b, 0) * q.astype(np.float32) + _f16(b, 2)


def _q8_0(b: Bytes) -> Float32:  # d, 32 int8: q d
    return _f16(b, 0) * b[:, 2:].view(np.int8).astype(np.float32)


def _q2_k(b: Bytes) -> Float32:
    # 16 bytes of (scale, min) nibbles, 64 bytes of 2-bit codes, d, dmin: 16 sub-blocks of 16
    scales = (b[:, :16] & 15).astype(np.float32) * _f16(b, 80)
    mins = (b[:, :16] >> 4).astype(np.float32) * _f16(b, 82)
    # Half h of 128 values uses bytes 32h..32h+31; its quarter j sits at bits 2j.
    q = b[:, 16:80].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1) & 3
    values: Float32 = scales[..., None] * q.reshape(-1, 16, 16).astype(np.float32) - mins[..., None]
    return values.reshape(-1, 256)


def _q3_k(b: Bytes) -> Float32:
    # 32 bytes of third bits, 64 of 2-bit codes, 12 of packed 6-bit scales, d: 16 sub-blocks of 16
    s = b[:, 96:108]
    low = np.concatenate([s[:, :8] & 15, s[:, :8] >> 4], axis=1)
    high = (s[:, 8:].reshape(-1, 1, 4) >> np.array([0, 2, 4, 6], np.uint8).reshape(1, 4, 1)) & 3
    scales = (low | (high.reshape(-1, 16) << 4)).astype(np.int8) - np.int8(32)
    shift = np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    q = (b[:, 32:96].reshape(-1, 2, 1, 32) >> shift & 3).reshape(-1, 256).astype(np.int8)
    third = (b[:, :32].reshape(-1, 1, 32) >> np.arange(8, dtype=np.uint8).reshape(1, 8, 1)) & 1
    q -= (third.reshape(-1, 256) ^ 1).astype(np.int8) << 2  # a clear bit subtracts 4
    d = _f16(b, 108) * scales.astype(np.float32)
    values: Float32 = d[..., None] * q.reshape(-1, 16, 16).astype(np.float32)
    return values.reshape(-1, 256)


def _q4_k(b: Bytes) -> Float32:
    # d, dmin, packed 6-bit scales and mins, nibbles: 8 sub-blocks of 32, two per 32 bytes
    scales, mins = _k_scales(b, 4)
    q = b[:, 16:].reshape(-1, 4, 1, 32) >> np.array([0, 4], np.uint8).reshape(1, 1, 2, 1) & 15
    values = (_f16(b, 0)[..., None] * scales) * q.reshape(-1, 8, 32).astype(np.float32)
    return (values - _f16(b, 2)[..., None] * mins).reshape(-1, 256)


def _q5_k(b: Bytes) -> Float32:
    # as q4_k with 32 bytes of fifth bits before the nibbles: bit j belongs to sub-block j
    scales, mins = _k_scales(b, 4)
    q = (b[:, 48:].reshape(-1, 4, 1, 32) >> np.array([0, 4], np.uint8).reshape(1, 1, 2, 1) & 15).reshape(
        -1, 8, 32
    )
    fifth = (b[:, 16:48].reshape(-1, 1, 32) >> np.arange(8, dtype=np.uint8).reshape(1, 8, 1)) & 1
    values = (_f16(b, 0)[..., None] * scales) * (q | (fifth << 4)).astype(np.float32)
    return (values - _f16(b, 2)[..., None] * mins).reshape(-1, 256)


def _q6_k(b: Bytes) -> Float32:
    # 128 bytes of low nibbles, 64 of high 2 bits, 16 int8 scales, d: 16 sub-blocks of 16
    low = b[:, :128].reshape(-1, 2, 1, 64) >> np.array([0, 4], np.uint8).reshape(1, 1, 2, 1) & 15
    high = b[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1) & 3
    q = (low.reshape(-1, 256) | (high.reshape(-1, 256) << 4)).astype(np.int8) - np.int8(32)
    d = _f16(b, 208) * b[:, 192:208].view(np.int8).astype(np.float32)
    return (d[..., None] * q.reshape(-1, 16, 16).astype(np.float32)).reshape(-1, 256)


_DECODE: dict[str, Callable[[Bytes], Float32]] = {
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


# --- quantise: (n, block_size) float32 -> (n, block_bytes) uint8 ----------------------------------


def _half(values: Float32) -> Bytes:
    """(n, 1) float32 as float16 bytes, (n, 2)."""
    half = values.astype(np.float16)
    assert np.isfinite(half).all(), "a block's scale does not fit in float16"
    return half.view(np.uint8)


def _codes(x: Float32, step: Float32, low: int, high: int) -> npt.NDArray[np.int8]:
    """``x / step`` rounded and clipped; 0 where the step is 0."""
    safe = np.where(step == 0, np.float32(1), step)
    q = np.where(step == 0, np.float32(0), x / safe)
    return np.clip(np.rint(q), low, high).astype(np.int8)


def _stored(values: Float32) -> Float32:
    """What a decoder will read: codes are chosen for the rounded scale, not the exact one."""
    return values.astype(np.float16).astype(np.float32)


def _signed_peak(x: Float32) -> Float32:
    """The value of largest magnitude along the last axis, kept as an axis."""
    at = np.abs(x).argmax(axis=-1)[..., None]
    return np.take_along_axis(x, at, axis=-1)


def _pack_nibbles(q: Bytes) -> Bytes:
    half = q.shape[1] // 2
    packed: Bytes = q[:, :half] | (q[:, half:] << np.uint8(4))
    return packed


def _to_q4_0(x: Float32) -> Bytes:
    d = _signed_peak(x) / np.float32(-8)  # the peak takes code 0 = -8, the side with one more step
    q = _codes(x, _stored(d), -8, 7).astype(np.int16) + 8
    return np.concatenate([_half(d), _pack_nibbles(q.astype(np.uint8))], axis=1)


def _to_q4_1(x: Float32) -> Bytes:
    m = x.min(axis=1, keepdims=True)
    d = (x.max(axis=1, keepdims=True) - m) / np.float32(15)
    q = _codes(x - _stored(m), _stored(d), 0, 15).astype(np.uint8)
    return np.concatenate([_half(d), _half(m), _pack_nibbles(q)], axis=1)


def _to_q5_0(x: Float32) -> Bytes:
    d = _signed_peak(x) / np.float32(-16)
    q = (_codes(x, _stored(d), -16, 15) + np.int8(16)).view(np.uint8)
    fifth = np.packbits(q >> 4, axis=1, bitorder="little")
    return np.concatenate([_half(d), fifth, _pack_nibbles((q & 15).view(np.uint8))], axis=1)


def _to_q8_0(x: Float32) -> Bytes:
    d = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
    return np.concatenate([_half(d), _codes(x, _stored(d), -127, 127).view(np.uint8)], axis=1)


def _to_q4_k(x: Float32) -> Bytes:
    sub = x.reshape(-1, 8, 32)
    low = np.minimum(sub.min(axis=2), 0)
    step = (sub.max(axis=2) - low) / np.float32(15)
    d = step.max(axis=1, keepdims=True) / np.float32(63)
    dmin = (-low).max(axis=1, keepdims=True) / np.float32(63)
    scales = _codes(step, _stored(d), 0, 63).view(np.uint8)
    mins = _codes(-low, _stored(dmin), 0, 63).view(np.uint8)
    offset = (_stored(dmin) * mins)[..., None]
    q = _codes(sub + offset, (_stored(d) * scales)[..., None], 0, 15).view(np.uint8)
    packed = np.concatenate(
        [
            scales[:, :4] | ((scales[:, 4:] >> 4) << 6),
            mins[:, :4] | ((mins[:, 4:] >> 4) << 6),
            (scales[:, 4:] & 15) | ((mins[:, 4:] & 15) << 4),
        ],
        axis=1,
    )
    pairs = q.reshape(-1, 4, 2, 32)
    nibbles = (pairs[:, :, 0] | (pairs[:, :, 1] << 4)).reshape(-1, 128)
    return np.concatenate([_half(d), _half(dmin), packed, nibbles], axis=1)


def _to_q6_k(x: Float32) -> Bytes:
    sub = x.reshape(-1, 16, 16)
    step = _signed_peak(sub)[..., 0] / np.float32(-32)
    d = _signed_peak(step) / np.float32(-128)
    scales = _codes(step, _stored(d), -128, 127)
    steps = (_stored(d) * scales.astype(np.float32))[..., None]
    q = (_codes(sub, steps, -32, 31).astype(np.int16) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = (q[:, :, :2] & 15) | ((q[:, :, 2:] & 15) << 4)
    high = q >> 4 << np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    return np.concatenate(
        [
            low.reshape(-1, 128),
            np.bitwise_or.reduce(high, axis=2).reshape(-1, 64),
            scales.view(np.uint8),
            _half(d),
        ],
        axis=1,
    )


_ENCODE: dict[str, Callable[[Float32], Bytes]] = {
    "q4_0": _to_q4_0,
    "q4_1": _to_q4_1,
    "q5_0": _to_q5_0,
    "q8_0": _to_q8_0,
    "q4_k": _to_q4_k,
    "q6_k": _to_q6_k,
}
