"""``rows8``: weights of 8-bit codes on GPUs, as tensor copies (TMA) want them.

All codes, row after row, then all scales: N rows of K bytes, K rounded up to a multiple of 16 with zero
codes, and from the next multiple of 256 bytes on N scales, float32; of fp8_g128 N for each 128 columns, and
``PADDING`` behind. So boxes of rows and columns reach shared memory by themselves, and products of codes with
codes read them there as they are.

Torch-free; lossless, as every layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from pelton.errors import ConfigError
from pelton.ir import group_blocks
from pelton.ir.tensors import HostTensor

UInt8 = npt.NDArray[np.uint8]

#: Block types that it holds: a float32 scale, then a byte a column; of fp8_g128 of each 128 columns.
TYPES = ("int8_row", "fp8_row", "fp8_g128")
#: Bytes behind scales of groups, so that those of a tile of rows can be copied whole.
PADDING = 1024
_SCALE = 4


def row_bytes(cols: int) -> int:
    """From a row of codes to the next."""
    return -(-cols // 16) * 16


def scales_at(shape: tuple[int, ...]) -> int:
    """Where the scales of a weight (rows, columns) begin, in bytes."""
    rows, cols = shape
    return -(-rows * row_bytes(cols) // 256) * 256


def groups_of(quant: str, cols: int) -> int:
    """Scales of a row."""
    return -(-cols // group) if (group := group_blocks.group_of(quant)) else 1


class Rows8Layout:
    """``rows8`` (see the module's text)."""

    name = "rows8"
    panel_rows = 1

    def nbytes(self, quant: str, shape: tuple[int, ...]) -> int:
        self._check(quant, shape)
        groups = groups_of(quant, shape[1])
        return (
            scales_at(shape) + _SCALE * shape[0] * groups + (PADDING if group_blocks.group_of(quant) else 0)
        )

    def pack(self, tensor: HostTensor) -> UInt8:
        self._check(tensor.quant, tensor.shape)
        rows, cols = tensor.shape
        groups = groups_of(tensor.quant, cols)
        raw = np.ascontiguousarray(tensor.data).view(np.uint8).reshape(rows, groups, -1)
        out = np.zeros(self.nbytes(tensor.quant, tensor.shape), np.uint8)
        out[: rows * row_bytes(cols)].reshape(rows, -1)[:, :cols] = raw[..., _SCALE:].reshape(rows, cols)
        self._scales(out, groups, tensor.shape)[:] = raw[..., :_SCALE].swapaxes(0, 1)
        return out

    def _scales(self, data: UInt8, groups: int, shape: tuple[int, ...]) -> UInt8:
        """(groups, rows, 4) of packed ``data``."""
        begin = scales_at(shape)
        return data[begin : begin + _SCALE * groups * shape[0]].reshape(groups, shape[0], _SCALE)

    def join(self, pieces: Iterable[UInt8], quant: str, shape: tuple[int, ...]) -> Iterator[UInt8]:
        """The codes of each piece as it comes, and at the end all scales."""
        rows, cols = shape
        width, groups, scales = row_bytes(cols), groups_of(quant, cols), []
        for piece in pieces:
            count = piece.nbytes // (width + _SCALE * groups)  # or, as the scales' place is rounded up, fewer
            while self.nbytes(quant, (count, cols)) > piece.nbytes:
                count -= 1
            yield piece[: count * width]
            scales.append(self._scales(piece, groups, (count, cols)))
        yield np.zeros(scales_at(shape) - rows * width, np.uint8)
        yield np.concatenate(scales, axis=1).reshape(-1)
        yield np.zeros(PADDING if group_blocks.group_of(quant) else 0, np.uint8)

    def to_rows(self, data: UInt8, quant: str, shape: tuple[int, ...]) -> UInt8:
        self._check(quant, shape)
        rows, cols = shape
        groups = groups_of(quant, cols)
        codes = data[: rows * row_bytes(cols)].reshape(rows, -1)[:, :cols].reshape(rows, groups, -1)
        scales = self._scales(data, groups, shape).swapaxes(0, 1)
        return np.concatenate([scales, codes], axis=2).reshape(rows, -1)

    def unpack(self, data: UInt8, quant: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
        return group_blocks.decode(self.to_rows(data, quant, shape), quant).reshape(shape)

    def _check(self, quant: str, shape: tuple[Any, ...]) -> None:
        if quant not in TYPES or len(shape) != 2:
            raise ConfigError(
                f"the layout {self.name} is for matrices of {' and '.join(TYPES)}, not for {quant} {shape}"
            )
