"""A tensor in host memory with its quantisation, independent of torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pelton.dtypes import is_dense


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
