"""Block types of other quantisers' checkpoints: their bytes, the values they stand for, and the way back.

| type           | a row                                   | value                        | read from        |
|----------------|-----------------------------------------|------------------------------|------------------|
| int<n>_g<size> | per group: d, uint8 z, packed codes     | ``d (q - z)``, q in [0, 2^n) | GPTQ, AWQ, ...   |
| int8_row       | float32 d, then int8 q                  | ``d q``                      | W8A8             |
| fp8_row        | float32 d, then e4m3 q                  | ``d e4m3(q)``                | fp8, tensor, row |
| fp8_g128       | per 128 columns: float32 d, e4m3 q      | ``d e4m3(q)``                | fp8 in blocks    |
| nf4_g64        | per 64: float32 d, packed codes         | ``d NF4[q]``                 | bitsandbytes     |
| fp4_g64        | per 64: float32 d, packed codes         | ``d E2M1[q]``                | Pelton's own     |
| nvfp4          | float32 d; per 16: e4m3 s, packed codes | ``d e4m3(s) E2M1[q]``        | ModelOpt         |
| mxfp4          | per 32: e8m0 s, packed codes            | ``2^(s - 127) E2M1[q]``      | microscaling     |

The d of a group is float16, and float32 of 8-bit codes, whose steps are too small for float16's range.
Codes are packed in planes: of a group of g values, 4-bit codes take g / 2 bytes (byte j: value j low, value
j + g / 2 high), 2-bit codes g / 4 (byte j: values j, j + g / 4, ... from the lowest bits up), 3-bit codes
their lower two bits as 2-bit codes and then g / 8 bytes of third bits (byte j, bit i: value 8 j + i).
e4m3 is OCP's FP8 E4M3FN: no infinities, NaN at 0x7F and 0xFF, largest 448. NF4: Dettmers et al. 2023 (QLoRA),
appendix E; E2M1: OCP Microscaling formats 1.0. numpy only.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pelton.dtypes import BLOCK_TYPES, GROUP_BLOCK_TYPES, GROUP_SIZES
from pelton.ir.tensors import HostTensor

Array = npt.NDArray[Any]
UInt8 = npt.NDArray[np.uint8]
Float32 = npt.NDArray[np.float32]

#: Fields of a block, little endian, as ``blocks.BLOCK_DTYPES``.
DTYPES: dict[str, np.dtype[Any]] = {
    **{
        f"int{bits}_g{size}": np.dtype(
            [("d", "<f4" if bits == 8 else "<f2"), ("z", "u1"), ("qs", "u1", size * bits // 8)]
        )
        for bits in (2, 3, 4, 8)
        for size in GROUP_SIZES
    },
    "int8_row": np.dtype([("qs", "i1", 1)]),
    "fp8_row": np.dtype([("qs", "u1", 1)]),
    "fp8_g128": np.dtype([("d", "<f4"), ("qs", "u1", 128)]),
    "nf4_g64": np.dtype([("d", "<f4"), ("qs", "u1", 32)]),
    "fp4_g64": np.dtype([("d", "<f4"), ("qs", "u1", 32)]),
    "nvfp4": np.dtype([("s", "u1"), ("qs", "u1", 8)]),
    "mxfp4": np.dtype([("s", "u1"), ("qs", "u1", 16)]),
}
assert DTYPES.keys() == GROUP_BLOCK_TYPES.keys()


def _e4m3_values() -> Float32:
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, (codes & 7) / 8
    size = np.where(exponent == 0, 2.0**-6 * mantissa, 2.0 ** (exponent - 7.0) * (1 + mantissa))
    size[codes & 127 == 127] = np.nan
    return np.where(codes < 128, size, -size).astype(np.float32)


#: The value of each e4m3 code.
E4M3: Float32 = _e4m3_values()
E4M3_MAX = 448.0
#: The values of 4-bit codes. NF4's are quantiles of a normal distribution, scaled to [-1, 1].
E2M1: Float32 = np.array(
    [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6],
    np.float32,
)
NF4: Float32 = np.array(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    np.float32,
)
_CODEBOOK = {"nf4_g64": NF4, "fp4_g64": E2M1, "nvfp4": E2M1, "mxfp4": E2M1}


def bits_of(quant: str) -> int:
    """Bits of a code."""
    if quant.startswith("int"):
        return int(quant[3])
    return 8 if quant.startswith("fp8") else 4


def group_of(quant: str) -> int:
    """Values that share a scale; 0: the whole row."""
    block = GROUP_BLOCK_TYPES[quant]
    return 0 if block.block_size == 1 else block.block_size


def to_e4m3(values: Array) -> UInt8:
    """float32 values rounded to the nearest e4m3 code, ties to even; beyond 448 they become 448, NaN 0x7F."""
    x = np.asarray(values, np.float32)
    size = np.minimum(np.abs(x), np.float32(E4M3_MAX))
    _, exponent = np.frexp(np.where(np.isfinite(size), size, 1))
    # Steps of 2^(exponent - 4) above the smallest normal number, 2^-6; of 2^-9 below.
    step = np.ldexp(np.float32(1), np.maximum(exponent - 4, -9))
    rounded = np.rint(size / step) * step
    codes = np.searchsorted(E4M3[:127], np.where(np.isfinite(rounded), rounded, 0)).astype(np.uint8)
    codes = np.where(np.isnan(x), np.uint8(0x7F), codes)
    signed: UInt8 = codes | np.signbit(x).astype(np.uint8) << np.uint8(7)
    return signed


def pack_bits(codes: UInt8, bits: int) -> UInt8:
    """(..., g) codes of ``bits`` bits -> (..., g * bits / 8) bytes, as the module's text says."""
    if bits == 8:
        return codes
    g = codes.shape[-1]
    if bits == 3:
        third = np.packbits(codes >> np.uint8(2) & np.uint8(1), axis=-1, bitorder="little")
        return np.concatenate([pack_bits(codes & np.uint8(3), 2), third], axis=-1)
    planes = codes.reshape(*codes.shape[:-1], 8 // bits, g * bits // 8)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    packed: UInt8 = np.bitwise_or.reduce(planes << shifts, axis=-2)
    return packed


def unpack_bits(packed: UInt8, bits: int) -> UInt8:
    """Inverse of ``pack_bits``."""
    if bits == 8:
        return packed
    if bits == 3:
        split = packed.shape[-1] * 2 // 3
        third = np.unpackbits(packed[..., split:], axis=-1, bitorder="little")
        low: UInt8 = unpack_bits(packed[..., :split], 2) | third << np.uint8(2)
        return low
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    planes = packed[..., None, :] >> shifts & np.uint8((1 << bits) - 1)
    return planes.reshape(*packed.shape[:-1], -1)


def _parts(raw: UInt8, quant: str) -> tuple[Float32 | None, Array]:
    """(rows, bytes) -> the rows' header scale (rows, 1), and the blocks (rows, blocks) of ``DTYPES``."""
    header = BLOCK_TYPES[quant].header
    body = np.ascontiguousarray(raw[:, header:]).view(DTYPES[quant])
    if not header:
        return None, body
    return np.ascontiguousarray(raw[:, :header]).view("<f4").astype(np.float32), body


def scales(raw: Array, quant: str) -> Float32:
    """(rows, bytes) -> (rows, scales) float32: of the groups, or of the rows."""
    row, blocks = _parts(raw.view(np.uint8), quant)
    if quant == "nvfp4":
        assert row is not None
        product: Float32 = row * E4M3[blocks["s"]]
        return product
    if quant == "mxfp4":
        # 0xFF is e8m0's NaN.
        exponent = np.where(blocks["s"] == 255, np.nan, blocks["s"] - np.float32(127))
        return np.exp2(exponent).astype(np.float32)
    values: Float32 = row if row is not None else blocks["d"].astype(np.float32)
    return values


def codes(tensor: HostTensor) -> tuple[UInt8, Float32, UInt8 | None]:
    """A tensor's codes (rows, cols), scales (rows, groups) and zero points (rows, groups).

    int8_row's codes are int8 bit patterns. Only the ``int<n>_g<size>`` types have zero points.
    """
    quant, raw = tensor.quant, tensor.data.view(np.uint8)
    _, blocks = _parts(raw, quant)
    packed = np.ascontiguousarray(blocks["qs"]).view(np.uint8)
    q = unpack_bits(packed, bits_of(quant)).reshape(len(raw), -1)
    has_zero = "z" in (blocks.dtype.names or ())
    return q, scales(raw, quant), np.ascontiguousarray(blocks["z"]) if has_zero else None


def from_codes(
    quant: str, q: UInt8, d: Array, z: UInt8 | None = None, row: Array | None = None
) -> HostTensor:
    """The tensor of codes ``q`` (rows, cols), scales ``d`` (rows, groups; (rows, 1) of row types) and, for
    the ``int<n>_g<size>`` types, zero points ``z`` (rows, groups; None: the middle code, 2^(n - 1)).

    ``d`` is rounded to the type's scale: float16 or float32, of mxfp4 a power of two, of nvfp4 an e4m3
    multiple of ``row`` (rows, 1), the row's header.
    """
    rows, cols = q.shape
    block = BLOCK_TYPES[quant]
    out = np.empty((rows, block.row_bytes(cols)), np.uint8)
    body = np.empty((rows, cols // block.block_size), DTYPES[quant])
    grouped = np.ascontiguousarray(q).view(np.uint8).reshape(rows, -1, block.block_size)
    body["qs"] = pack_bits(grouped, bits_of(quant)).view(body["qs"].dtype)
    header = d
    if quant == "nvfp4":
        assert row is not None
        header, body["s"] = row, to_e4m3(d / row)
    elif quant == "mxfp4":
        # 2^-127 of a group of zeros: its codes are 0.
        body["s"] = np.where(d == 0, 0, np.frexp(d)[1] - 1 + 127)
    elif not block.header:
        body["d"] = d
    if block.header:
        out[:, : block.header] = np.ascontiguousarray(header, "<f4").reshape(rows, 1).view(np.uint8)
    if "z" in (body.dtype.names or ()):
        body["z"] = 1 << (bits_of(quant) - 1) if z is None else z
    out[:, block.header :] = body.view(np.uint8).reshape(rows, -1)
    return HostTensor(quant, (rows, cols), out)


def from_parts(quant: str, q: UInt8, s: UInt8, d: Array | None) -> HostTensor:
    """The nvfp4 or mxfp4 tensor of codes ``q`` (rows, cols), scale codes ``s`` (rows, groups), e4m3 or e8m0,
    and nvfp4's float32 scales ``d`` (rows, 1)."""
    rows, cols = q.shape
    block = BLOCK_TYPES[quant]
    body = np.empty((rows, cols // block.block_size), DTYPES[quant])
    body["s"], body["qs"] = s, pack_bits(q.reshape(rows, -1, block.block_size), 4)
    out = np.empty((rows, block.row_bytes(cols)), np.uint8)
    if d is not None:
        out[:, : block.header] = np.ascontiguousarray(d, "<f4").view(np.uint8)
    out[:, block.header :] = body.view(np.uint8).reshape(rows, -1)
    return HostTensor(quant, (rows, cols), out)


def parts(tensor: HostTensor) -> tuple[UInt8, UInt8, Float32 | None]:
    """Inverse of ``from_parts``."""
    d, blocks = _parts(tensor.data.view(np.uint8), tensor.quant)
    q = unpack_bits(np.ascontiguousarray(blocks["qs"]), 4).reshape(len(blocks), -1)
    return q, np.ascontiguousarray(blocks["s"]), d


def decode(raw: UInt8, quant: str) -> Float32:
    """(rows, bytes) -> (rows, cols) float32: in float32 arithmetic, each product rounded once."""
    q, d, z = codes(HostTensor(quant, (), raw))
    grouped = q.reshape(*d.shape, -1)
    if z is not None:
        values = grouped.astype(np.float32) - z[..., None].astype(np.float32)
    elif quant == "int8_row":
        values = grouped.view(np.int8).astype(np.float32)
    elif quant.startswith("fp8"):
        values = E4M3[grouped]
    else:
        values = _CODEBOOK[quant][grouped]
    product: Float32 = d[..., None] * values
    return product.reshape(q.shape)
