"""Requantise block types that have no native kernels to one that has.

No quantisation algorithm: an engine keeps what the checkpoint holds wherever kernels know its type.
"""

from __future__ import annotations

import numpy as np

from pelton.dtypes import BLOCK_TYPES, NATIVE_BLOCK_TYPES
from pelton.ir.block_encoder import quantize
from pelton.ir.blocks import dequantize, row_chunks
from pelton.ir.tensors import HostTensor


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
    for part in row_chunks(rows, cols):
        piece = HostTensor(tensor.quant, (part.stop - part.start, cols), tensor.data[part])
        values = dequantize(piece)
        encoded = quantize(values, "q8_0")
        packed[part] = encoded.data
        error += float(np.square(dequantize(encoded) - values, dtype=np.float64).sum())
        total += float(np.square(values, dtype=np.float64).sum())
    result = HostTensor("q8_0", (rows, cols), packed)
    relative = (error / total) ** 0.5 if total else 0.0
    return result, f"{tensor.quant} repacked as q8_0, relative error {relative:.1e}"
