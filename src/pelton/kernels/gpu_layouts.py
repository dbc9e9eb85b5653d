"""``mma16``: the layout of quantised weights on GPUs, in the order of tensor-core fragments.

A panel is 16 rows: its codes, then its scales. A weight's panels follow one another; rows and columns are
padded with zero codes and zero scales to whole panels and to whole *blocks* of columns: 32 of 8-bit codes, 64
of others, whose two halves of 32 share bytes (the first in the low nibbles). Codes of 2 and 3 bits take 4;
what those of 5 and 6 have above 4 follows each block.

The codes of a block are 32 x 16 bytes: of each lane of a warp what it needs of the 16 x 32 values for two
products m16n8k16 (PTX ISA, "Matrix fragments for mma.m16n8k16"), so that 16-byte loads end in the registers
where they belong. With lane = 4 g + q and byte = 8 s + 4 c + 2 h + e the value is that of row 8 h + g and
column 16 s + 8 c + 2 q + e. The upper bits of a lane's codes of the n-th half are in bytes 2 h + e of a word:
of 5 bits, bit 4 n + 2 s + c; of 6, from bit 4 s + 2 c on, in the n-th of two words.

| type           | scale area of a panel                                                |
|----------------|----------------------------------------------------------------------|
| int<n>_g<size> | per group: d[16] (float16; float32 of 8-bit codes), uint8 z[16]      |
| int8_row       | float32 d[16]                                                        |
| fp8_row        | float32 d[16]                                                        |
| fp8_g128       | per group: float32 d[16]                                             |
| nf4_g64        | per group: float32 d[16]                                             |
| fp4_g64        | per group: float32 d[16]                                             |
| nvfp4          | float32 d[16], then per 16 columns: e4m3 s[16]                       |
| mxfp4          | per 32 columns: e8m0 s[16]                                           |
| GGUF's         | ``gpu_gguf.py``                                                      |

Torch-free; lossless, as every layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from pelton.dtypes import BLOCK_TYPES, GGUF_BLOCK_TYPES
from pelton.errors import ConfigError
from pelton.ir import blocks, group_blocks
from pelton.ir.tensors import HostTensor
from pelton.kernels import gpu_gguf
from pelton.kernels.gpu_types import GPU_TYPES, SUPER

Array = npt.NDArray[Any]
UInt8 = npt.NDArray[np.uint8]

PANEL = 16
#: Rows packed at a time, so that temporaries stay small beside the result.
_CHUNK_ROWS = 1024


def block_columns(quant: str) -> int:
    """Columns of a block of codes."""
    return 32 if GPU_TYPES[quant].bits == 8 else 64


def block_bytes(quant: str) -> int:
    """Bytes of a panel's block of codes: a multiple of 128."""
    bits = GPU_TYPES[quant].bits
    return 512 if bits == 8 else 128 * max(bits, 4)


def padded_columns(quant: str, cols: int) -> int:
    """Columns of a packed row, of whole blocks."""
    return -(-cols // block_columns(quant)) * block_columns(quant)


def code_bytes(quant: str, cols: int) -> int:
    """Bytes of a panel's codes, which begin it."""
    return padded_columns(quant, cols) // block_columns(quant) * block_bytes(quant)


def panel_bytes(quant: str, cols: int) -> int:
    """Bytes of 16 packed rows: a multiple of 16."""
    kind, scales = GPU_TYPES[quant], BLOCK_TYPES[quant].header * PANEL
    if kind.area_columns:
        scales += -(-padded_columns(quant, cols) // kind.area_columns) * kind.area_bytes
    return code_bytes(quant, cols) + scales


class Mma16Layout:
    """``mma16`` (see the module's text)."""

    name = "mma16"
    panel_rows = PANEL

    def nbytes(self, quant: str, shape: tuple[int, ...]) -> int:
        rows, cols = self._matrix(quant, shape)
        return -(-rows // PANEL) * panel_bytes(quant, cols)

    def pack(self, tensor: HostTensor) -> UInt8:
        quant = tensor.quant
        rows, cols = self._matrix(quant, tensor.shape)
        raw = np.ascontiguousarray(tensor.data).view(np.uint8).reshape(rows, -1)
        out = np.zeros((-(-rows // PANEL), panel_bytes(quant, cols)), np.uint8)
        for start in range(0, rows, _CHUNK_ROWS):
            part = raw[start : start + _CHUNK_ROWS]
            if padding := -len(part) % PANEL:
                part = np.concatenate([part, np.zeros((padding, part.shape[1]), np.uint8)])
            panels = out[start // PANEL : start // PANEL + len(part) // PANEL]
            self._pack(part, quant, cols, panels)
        return out.reshape(-1)

    def _pack(self, part: UInt8, quant: str, cols: int, panels: UInt8) -> None:
        header, bits = BLOCK_TYPES[quant].header, GPU_TYPES[quant].bits
        codes, fields = gpu_gguf.split(part, quant) if quant in GGUF_BLOCK_TYPES else _split(part, quant)
        padded = padded_columns(quant, cols)
        if padded > cols:
            codes = np.concatenate([codes, np.zeros((len(part), padded - cols), np.uint8)], axis=1)
        end = code_bytes(quant, cols)
        blocked = panels[:, :end].reshape(len(panels), -1, block_bytes(quant))
        halves = codes.reshape(len(part), -1, block_columns(quant) // 32, 32)
        low = halves[:, :, 0] if bits == 8 else halves[:, :, 0] & 15 | halves[:, :, 1] << np.uint8(4)
        # (panel, h, g, block, s, c, q); e is a byte of the two.
        wide = np.ascontiguousarray(low).view(np.uint16).reshape(len(panels), 2, 8, -1, 2, 2, 4)
        ordered = np.ascontiguousarray(wide.transpose(0, 3, 2, 6, 4, 5, 1)).view(np.uint8)
        blocked[:, :, :512] = ordered.reshape(*blocked.shape[:2], 512)
        if 4 < bits < 8:
            blocked[:, :, 512:] = _upper(halves, bits).reshape(*blocked.shape[:2], -1)
        if header:
            heads = np.ascontiguousarray(part[:, :header]).reshape(len(panels), -1)
            panels[:, end : end + heads.shape[1]] = heads
            end += heads.shape[1]
        if fields:
            by_row = [f.reshape(len(panels), PANEL, *f.shape[1:]).transpose(0, 2, 3, 1, 4) for f in fields]
            joined = np.concatenate([f.reshape(*f.shape[:2], -1) for f in by_row], axis=-1)
            joined = joined.reshape(len(panels), -1)
            panels[:, end : end + joined.shape[1]] = joined

    def join(self, pieces: Iterable[UInt8], quant: str, shape: tuple[int, ...]) -> Iterator[UInt8]:
        yield from pieces

    def to_rows(self, data: UInt8, quant: str, shape: tuple[int, ...]) -> UInt8:
        rows, cols = self._matrix(quant, shape)
        panels = data[: self.nbytes(quant, shape)].reshape(-1, panel_bytes(quant, cols))
        out = np.empty((len(panels) * PANEL, BLOCK_TYPES[quant].row_bytes(cols)), np.uint8)
        step = _CHUNK_ROWS // PANEL
        for start in range(0, len(panels), step):
            part = panels[start : start + step]
            self._to_rows(part, quant, cols, out[start * PANEL : (start + len(part)) * PANEL])
        return out[:rows]

    def _to_rows(self, panels: UInt8, quant: str, cols: int, out: UInt8) -> None:
        header, kind = BLOCK_TYPES[quant].header, GPU_TYPES[quant]
        end, padded = code_bytes(quant, cols), padded_columns(quant, cols)
        blocked = panels[:, :end].reshape(len(panels), padded // block_columns(quant), -1)
        packed = blocked[:, :, :512].reshape(*blocked.shape[:2], 1, 8, 4, 2, 2, 2, 2)
        halves = packed if kind.bits == 8 else np.concatenate([packed & 15, packed >> np.uint8(4)], axis=2)
        if 4 < kind.bits < 8:
            halves |= _from_upper(blocked[:, :, 512:], kind.bits)
        codes = halves.transpose(0, 7, 3, 1, 2, 5, 6, 4, 8).reshape(len(out), padded)[:, :cols]
        if header:
            out[:, :header] = panels[:, end : end + header * PANEL].reshape(len(out), header)
            end += header * PANEL
        fields: list[UInt8] = []
        if kind.area_columns:
            areas = panels[:, end:].reshape(len(panels), -1, kind.area_bytes)[:, : cols // kind.area_columns]
            at = 0
            for n, width in _field_sizes(quant):
                raw = areas[..., at : at + n * PANEL * width].reshape(*areas.shape[:2], n, PANEL, width)
                fields.append(raw.transpose(0, 3, 1, 2, 4).reshape(len(out), areas.shape[1], n, width))
                at += n * PANEL * width
        codes = np.ascontiguousarray(codes)
        if quant in GGUF_BLOCK_TYPES:
            gpu_gguf.join(codes, fields, quant, out)
        else:
            _join(codes, fields, quant, out[:, header:])

    def unpack(self, data: UInt8, quant: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
        return blocks.dequantize_rows(self.to_rows(data, quant, shape), quant).reshape(shape)

    def _matrix(self, quant: str, shape: tuple[int, ...]) -> tuple[int, int]:
        if quant not in GPU_TYPES or len(shape) != 2:
            raise ConfigError(
                f"the layout {self.name} is for matrices of {', '.join(GPU_TYPES)}, not for {quant} {shape}"
            )
        rows, cols = shape
        return rows, cols


def _split(raw: UInt8, quant: str) -> tuple[UInt8, list[UInt8]]:
    """As ``gpu_gguf.split``, of the types of ``group_blocks``."""
    body = np.ascontiguousarray(raw[:, BLOCK_TYPES[quant].header :]).view(group_blocks.DTYPES[quant])
    codes = np.ascontiguousarray(body["qs"]).view(np.uint8)
    codes = group_blocks.unpack_bits(codes, group_blocks.bits_of(quant)).reshape(len(raw), -1)
    names = [name for name in body.dtype.names or () if name != "qs"]
    parts = [np.ascontiguousarray(body[name])[..., None].view(np.uint8) for name in names]
    return codes, [part[:, :, None] for part in parts]


def _join(codes: UInt8, fields: list[UInt8], quant: str, out: UInt8) -> None:
    """Inverse of ``_split``, without a row's header."""
    body = np.empty((len(out), codes.shape[1] // BLOCK_TYPES[quant].block_size), group_blocks.DTYPES[quant])
    grouped = codes.reshape(*body.shape, -1)
    body["qs"] = group_blocks.pack_bits(grouped, group_blocks.bits_of(quant)).view(body["qs"].dtype)
    names = [name for name in body.dtype.names or () if name != "qs"]
    for name, field in zip(names, fields, strict=True):
        body[name] = np.ascontiguousarray(field).view(body[name].dtype).reshape(body.shape)
    out[:] = body.view(np.uint8).reshape(len(out), -1)


def _field_sizes(quant: str) -> list[tuple[int, int]]:
    """Of each field of a scale area: how often it is there for a row, and its bytes."""
    kind = GPU_TYPES[quant]
    if kind.super_scales:
        words = (SUPER // kind.group // 4, 4)
        return [(1, 4), words, words] if kind.offset else [(1, 2), words]
    if quant in GGUF_BLOCK_TYPES:
        return [(1, kind.area_bytes // PANEL)]
    dtype = group_blocks.DTYPES[quant]
    return [(1, dtype[name].itemsize) for name in dtype.names or () if name != "qs"]


def _upper(halves: UInt8, bits: int) -> UInt8:
    """Codes (rows, blocks, 2, 32) -> (panels, blocks, bytes): their bits above 4."""
    upper = (halves >> np.uint8(4)).reshape(-1, 2, 8, halves.shape[1], 2, 2, 2, 4, 2)
    upper = upper.transpose(0, 3, 2, 7, 4, 1, 8, 5, 6)  # panel, block, g, q, n, h, e, s, c
    by_index = np.ascontiguousarray(upper).reshape(*upper.shape[:7], 4)
    if bits == 5:
        by_index = by_index.transpose(0, 1, 2, 3, 5, 6, 4, 7).reshape(*upper.shape[:4], 2, 2, 8)
    shifts = np.arange(0, 8, bits - 4, dtype=np.uint8)
    packed: UInt8 = np.bitwise_or.reduce(by_index << shifts, axis=-1)
    return packed.reshape(*packed.shape[:2], -1)


def _from_upper(packed: UInt8, bits: int) -> UInt8:
    """Inverse of ``_upper``: (panels, blocks, n, g, q, s, c, h, e), moved to where codes have them."""
    shifts = np.arange(0, 8, bits - 4, dtype=np.uint8)
    words = packed.reshape(*packed.shape[:2], 8, 4, -1, 2, 2)[..., None] >> shifts & np.uint8(
        (1 << bits - 4) - 1
    )
    if bits == 5:  # the half is part of the bit's index
        words = words.reshape(*words.shape[:4], 2, 2, 2, 4).transpose(0, 1, 2, 3, 6, 4, 5, 7)
    words = words.reshape(*words.shape[:7], 2, 2)  # panel, block, g, q, n, h, e, s, c
    return words.transpose(0, 1, 4, 2, 3, 7, 8, 5, 6) << np.uint8(4)
