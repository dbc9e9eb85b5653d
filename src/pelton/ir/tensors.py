"""A tensor in host memory with its quantisation, independent of torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pelton.dtypes import is_dense


class ValuesNotRead(Exception):
    """Raised instead of reading the tensor it names, where only headers may be looked at (a dry run)."""


@dataclass(frozen=True)
class HostTensor:
    """Values as checkpoints hold them.

    ``quant`` is a dense dtype or a block type. Dense data has ``shape``; bfloat16 is kept as uint16
    bit patterns. Block-quantised data is uint8 of shape ``(rows, bytes_per_row)`` in GGUF's block
    layout, where ``shape == (rows, cols)`` is the logical one.
    """

    quant: str
    shape: tuple[int, ...]
    data: npt.NDArray[np.generic]

    @property
    def nbytes(self) -> int:
        return int(self.data.nbytes)

    @property
    def dense(self) -> bool:
        return is_dense(self.quant)


def bf16_to_f32(bits: npt.NDArray[np.generic]) -> npt.NDArray[np.float32]:
    """bfloat16 bit patterns (uint16) as float32, exactly."""
    return (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def f32_to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """float32 rounded to nearest even bfloat16 bit patterns (uint16); NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    quiet_nan = ((bits >> 16) | 0x40).astype(np.uint16)
    return np.where((bits & 0x7FFFFFFF) > 0x7F800000, quiet_nan, rounded)
