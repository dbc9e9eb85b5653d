"""``mma16``: the layout of quantised weights on GPUs, in the order of tensor-core fragments.

A panel is 16 rows: its codes, then its scales. A weight's panels follow one another; rows and columns are
padded with zero codes and zero scales to whole panels and to whole *blocks* of columns: 32 of 8-bit codes, 64
of others, whose two halves of 32 share bytes (the first in the low nibbles). Codes of 2 and 3 bits take 4.

The codes of a block are 32 x 16 bytes: of each lane of a warp what it needs of the 16 x 32 values for two
products m16n8k16 (PTX ISA, "Matrix fragments for mma.m16n8k16"), so that 16-byte loads end in the registers
where they belong. With lane = 4 g + q and byte = 8 s + 4 c + 2 h + e the value is that of row 8 h + g and
column 16 s + 8 c + 2 q + e.

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

Torch-free; lossless, as every layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from pelton.dtypes import BLOCK_TYPES, GROUP_BLOCK_TYPES
from pelton.errors import ConfigError
from pelton.ir import group_blocks
from pelton.ir.tensors import HostTensor

Array = npt.NDArray[Any]
UInt8 = npt.NDArray[np.uint8]

PANEL = 16
#: Rows packed at a time, so that temporaries stay small beside the result.
_CHUNK_ROWS = 1024


def block_columns(quant: str) -> int:
    """Columns of a block of codes: 512 bytes of a panel."""
    return 32 if group_blocks.bits_of(quant) == 8 else 64


def padded_columns(quant: str, cols: int) -> int:
    """Columns of a packed row, of whole blocks."""
    return -(-cols // block_columns(quant)) * block_columns(quant)


def code_bytes(quant: str, cols: int) -> int:
    """Bytes of a panel's codes, which begin it."""
    return padded_columns(quant, cols) // block_columns(quant) * 512


def scale_bytes(quant: str) -> int:
    """Bytes of a panel's scales for one group of columns (row types: for the row)."""
    block = GROUP_BLOCK_TYPES[quant]
    if group_blocks.group_of(quant) == 0:
        return 4 * PANEL
    return (block.block_bytes - _code_bytes_of_group(quant)) * PANEL


def _code_bytes_of_group(quant: str) -> int:
    return group_blocks.DTYPES[quant]["qs"].itemsize


def panel_bytes(quant: str, cols: int) -> int:
    """Bytes of 16 packed rows: a multiple of 16."""
    block = GROUP_BLOCK_TYPES[quant]
    group = group_blocks.group_of(quant)
    scales = block.header * PANEL
    if group:
        scales += -(-padded_columns(quant, cols) // group) * scale_bytes(quant)
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
        header = BLOCK_TYPES[quant].header
        blocks = np.ascontiguousarray(part[:, header:]).view(group_blocks.DTYPES[quant])
        bits = group_blocks.bits_of(quant)
        codes = group_blocks.unpack_bits(np.ascontiguousarray(blocks["qs"]).view(np.uint8), bits)
        codes = codes.reshape(len(part), cols)
        padded = padded_columns(quant, cols)
        if padded > cols:
            codes = np.concatenate([codes, np.zeros((len(part), padded - cols), np.uint8)], axis=1)
        blocked = codes.reshape(len(part), -1, block_columns(quant) // 32, 32)
        halves = blocked[:, :, 0] if bits == 8 else blocked[:, :, 0] | blocked[:, :, 1] << np.uint8(4)
        # (panel, h, g, block, s, c, q); e is a byte of the two.
        wide = np.ascontiguousarray(halves).view(np.uint16).reshape(len(panels), 2, 8, -1, 2, 2, 4)
        end = code_bytes(quant, cols)
        ordered = wide.transpose(0, 3, 2, 6, 4, 5, 1)
        panels[:, :end] = np.ascontiguousarray(ordered).view(np.uint8).reshape(len(panels), -1)
        if header:
            heads = np.ascontiguousarray(part[:, :header]).reshape(len(panels), -1)
            panels[:, end : end + heads.shape[1]] = heads
            end += heads.shape[1]
        if fields := self._fields(quant):
            by_group = [
                np.moveaxis(np.ascontiguousarray(blocks[f]).reshape(len(panels), PANEL, -1), 1, 2)
                for f in fields
            ]
            as_bytes = [np.ascontiguousarray(f).view(np.uint8) for f in by_group]
            joined = np.concatenate(as_bytes, axis=-1).reshape(len(panels), -1)
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
        header, bits = BLOCK_TYPES[quant].header, group_blocks.bits_of(quant)
        end, padded = code_bytes(quant, cols), padded_columns(quant, cols)
        packed = panels[:, :end].reshape(len(panels), padded // block_columns(quant), 1, 8, 4, 2, 2, 2, 2)
        halves = packed if bits == 8 else np.concatenate([packed & 15, packed >> np.uint8(4)], axis=2)
        codes = halves.transpose(0, 7, 3, 1, 2, 5, 6, 4, 8).reshape(len(out), padded)[:, :cols]
        body = np.empty((len(out), cols // BLOCK_TYPES[quant].block_size), group_blocks.DTYPES[quant])
        grouped = np.ascontiguousarray(codes).reshape(len(out), body.shape[1], -1)
        body["qs"] = group_blocks.pack_bits(grouped, bits).view(body["qs"].dtype)
        if header:
            out[:, :header] = panels[:, end : end + header * PANEL].reshape(len(out), header)
            end += header * PANEL
        if fields := self._fields(quant):
            groups = -(-padded // BLOCK_TYPES[quant].block_size)
            area = panels[:, end:].reshape(len(panels), groups, -1)[:, : body.shape[1]]
            at = 0
            for field in fields:
                kind = body[field].dtype
                raw = np.ascontiguousarray(area[..., at : at + kind.itemsize * PANEL]).view(kind)
                body[field] = np.moveaxis(raw, 2, 1).reshape(len(out), -1)
                at += kind.itemsize * PANEL
        out[:, header:] = body.view(np.uint8).reshape(len(out), -1)

    def unpack(self, data: UInt8, quant: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
        return group_blocks.decode(self.to_rows(data, quant, shape), quant).reshape(shape)

    def _fields(self, quant: str) -> list[str]:
        """A block's fields besides its codes, in their order."""
        return [f for f in group_blocks.DTYPES[quant].names or () if f != "qs"]

    def _matrix(self, quant: str, shape: tuple[int, ...]) -> tuple[int, int]:
        if quant not in GROUP_BLOCK_TYPES or len(shape) != 2:
            raise ConfigError(
                f"the layout {self.name} is for matrices of {', '.join(GROUP_BLOCK_TYPES)}, "
                f"not for {quant} {shape}"
            )
        rows, cols = shape
        return rows, cols
