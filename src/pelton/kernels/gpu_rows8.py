"""``rows8``: weights of 8-bit codes with one scale a row on GPUs, as tensor copies (TMA) want them.

All codes, row after row, then all scales: N rows of K bytes, K rounded up to a multiple of 16 with zero
codes, and from the next multiple of 256 bytes on N scales, float32. So boxes of rows and columns reach shared
memory by themselves, and products of codes with codes read them there as they are.

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

#: Block types that it holds: a float32 scale, then a byte a column.
TYPES = ("int8_row", "fp8_row")
_SCALE = 4


def row_bytes(cols: int) -> int:
    """From a row of codes to the next."""
    return -(-cols // 16) * 16


def scales_at(shape: tuple[int, ...]) -> int:
    """Where the scales of a weight (rows, columns) begin, in bytes."""
    rows, cols = shape
    return -(-rows * row_bytes(cols) // 256) * 256


class Rows8Layout:
    """``rows8`` (see the module's text)."""

    name = "rows8"
    panel_rows = 1

    def nbytes(self, quant: str, shape: tuple[int, ...]) -> int:
        self._check(quant, shape)
        return scales_at(shape) + _SCALE * shape[0]

    def pack(self, tensor: HostTensor) -> UInt8:
        self._check(tensor.quant, tensor.shape)
        rows, cols = tensor.shape
        raw = np.ascontiguousarray(tensor.data).view(np.uint8).reshape(rows, -1)
        out = np.zeros(self.nbytes(tensor.quant, tensor.shape), np.uint8)
        out[: rows * row_bytes(cols)].reshape(rows, -1)[:, :cols] = raw[:, _SCALE:]
        out[scales_at(tensor.shape) :].reshape(rows, _SCALE)[:] = raw[:, :_SCALE]
        return out

    def join(self, pieces: Iterable[UInt8], quant: str, shape: tuple[int, ...]) -> Iterator[UInt8]:
        """The codes of each piece as it comes, and at the end all scales."""
        rows, cols = shape
        width, scales = row_bytes(cols), []
        for piece in pieces:
            count = piece.nbytes // (width + _SCALE)  # or, as the scales' place is rounded up, fewer
            while self.nbytes(quant, (count, cols)) > piece.nbytes:
                count -= 1
            yield piece[: count * width]
            scales.append(piece[piece.nbytes - _SCALE * count :])
        yield np.concatenate([np.zeros(scales_at(shape) - rows * width, np.uint8), *scales])

    def to_rows(self, data: UInt8, quant: str, shape: tuple[int, ...]) -> UInt8:
        self._check(quant, shape)
        rows, cols = shape
        codes = data[: rows * row_bytes(cols)].reshape(rows, -1)[:, :cols]
        scales = data[scales_at(shape) : self.nbytes(quant, shape)].reshape(rows, _SCALE)
        return np.concatenate([scales, codes], axis=1)

    def unpack(self, data: UInt8, quant: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
        return group_blocks.decode(self.to_rows(data, quant, shape), quant).reshape(shape)

    def _check(self, quant: str, shape: tuple[Any, ...]) -> None:
        if quant not in TYPES or len(shape) != 2:
            raise ConfigError(
                f"the layout {self.name} is for matrices of {' and '.join(TYPES)}, not for {quant} {shape}"
            )
