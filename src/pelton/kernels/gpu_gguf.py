"""GGUF's block types in ``mma16``: codes, and what a scale area holds of them. Torch-free.

| type       | a scale area                                                                        |
|------------|-------------------------------------------------------------------------------------|
| q4_1, q5_1 | per 32 columns: (d, m)[16], float16                                                 |
| q5_0       | per 32 columns: d[16], float16                                                      |
| q4_k, q5_k | per 128: (d, dmin)[16], float16; s[16] of four bytes; m[16] of four                 |
| q3_k, q6_k | per 128: d[16], float16; s[16] of four bytes, of the first four groups; the others  |
| q2_k       | per 128: (d, dmin)[16], float16; s[16], s[16] and m[16], m[16] of four bytes        |

The scales s and minimums m of groups are bytes, int8 where there are no minimums, so that a word has those of
a row's four groups. A super-block's float16 numbers are in the areas of both of its halves: q4_k's 4.5 bits a
value are 4.75.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pelton.ir import blocks
from pelton.kernels.gpu_types import GPU_TYPES

Array = npt.NDArray[Any]
UInt8 = npt.NDArray[np.uint8]


def split(raw: UInt8, quant: str) -> tuple[UInt8, list[UInt8]]:
    """``raw`` (rows, bytes) -> codes (rows, cols) and the fields of its areas, (rows, areas, n, bytes) each:
    n times in an area, of all its rows each time."""
    b = blocks.blocks_view(raw, quant)
    codes, scales, mins = _codes(b, quant), *_scales(b, quant)
    halves = [b[name] for name in ("d", "m", "dmin") if name in (b.dtype.names or ())]
    pairs = np.stack(halves, axis=-1).view(np.uint8)
    if scales is None:
        return codes, [pairs[:, :, None]]
    fields = [np.repeat(pairs, 2, axis=1)[:, :, None]]
    for small in (scales, mins):
        if small is not None:
            fields.append(np.ascontiguousarray(small).view(np.uint8).reshape(len(raw), 2 * b.shape[1], -1, 4))
    return codes, fields


def join(codes: UInt8, fields: list[UInt8], quant: str, out: UInt8) -> None:
    """Inverse of ``split``, into ``out``."""
    b = out.view(blocks.BLOCK_DTYPES[quant])
    areas = fields[0][:, :, 0]
    pairs = np.ascontiguousarray(areas if len(fields) == 1 else areas[:, ::2]).view("<u2")
    halves = [name for name in ("d", "m", "dmin") if name in (b.dtype.names or ())]
    for i, name in enumerate(halves):
        b[name] = pairs[..., i]
    small = [np.ascontiguousarray(f).reshape(*b.shape, -1) for f in fields[1:]]
    values = codes.reshape(*b.shape, -1)
    sub = values.reshape(*b.shape, -1, 32)
    match quant:
        case "q4_1" | "q5_0" | "q5_1":
            b["qs"] = blocks.pack_nibbles(values & 15)
            if quant != "q4_1":
                b["qh"] = np.packbits(values >> 4, axis=-1, bitorder="little")
        case "q2_k":
            b["qs"], b["scales"] = blocks.pack_two_bits(sub), small[0] | small[1] << 4
        case "q3_k":
            b["qs"], b["qh"] = blocks.pack_two_bits(sub & 3), blocks.pack_bit_planes(sub >> 2)
            b["scales"] = blocks.pack_q3_k_scales(small[0].view(np.int8))
        case "q6_k":
            b["ql"], b["qh"] = blocks.pack_q6_k_values(sub)
            b["scales"] = small[0].view(np.int8)
        case _:
            b["qs"], b["scales"] = blocks.pack_q4_k_values(sub & 15), blocks.pack_q4_k_scales(*small)
            if quant == "q5_k":
                b["qh"] = blocks.pack_bit_planes(sub >> 4)


def _codes(b: Array, quant: str) -> UInt8:
    match quant:
        case "q4_1":
            codes = blocks.nibbles(b["qs"])
        case "q5_0" | "q5_1":
            codes = blocks.nibbles(b["qs"]) | blocks.fifth_bits(b["qh"]) << 4
        case "q2_k":
            codes = blocks.two_bits(b["qs"])
        case "q3_k":
            codes = blocks.two_bits(b["qs"]) | blocks.bit_planes(b["qh"]) << 2
        case "q4_k":
            codes = blocks.q4_k_values(b["qs"])
        case "q5_k":
            codes = blocks.q4_k_values(b["qs"]) | blocks.bit_planes(b["qh"]) << 4
        case _:
            codes = blocks.q6_k_values(b["ql"], b["qh"])
    return np.ascontiguousarray(codes, np.uint8).reshape(len(b), -1)


def _scales(b: Array, quant: str) -> tuple[Array | None, Array | None]:
    """Scales and minimums of groups, (rows, blocks, groups) bytes, where there are any."""
    if not GPU_TYPES[quant].super_scales:
        return None, None
    if quant == "q2_k":
        return b["scales"] & 15, b["scales"] >> 4
    if quant == "q3_k":
        return blocks.q3_k_scales(b["scales"]), None
    return (b["scales"], None) if quant == "q6_k" else blocks.q4_k_scales(b["scales"])
