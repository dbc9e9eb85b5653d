"""Requantise block types that have no native kernels to one that has.

No quantisation algorithm: an engine keeps what the checkpoint holds wherever kernels know its type.
"""

from __future__ import annotations

import numpy as np

from pelton.dtypes import BLOCK_TYPES
from pelton.ir.block_encoder import quantize
from pelton.ir.blocks import blocks_view, dequantize, half, nibbles, row_chunks
from pelton.ir.group_blocks import from_codes
from pelton.ir.tensors import HostTensor

#: What block types without kernels become.
FALLBACK = "q8_0"
#: GGUF's types whose values another type holds exactly: a scale for 32 codes, and one zero point.
EQUAL = {"q4_0": "int4_g32", "q8_0": "int8_g32"}


def as_equal(tensor: HostTensor) -> HostTensor:
    """``tensor``, of a type of ``EQUAL``, in the type that is equal to it, bit for bit the same values."""
    blocks = blocks_view(tensor.data.view(np.uint8), tensor.quant)
    if tensor.quant == "q4_0":
        codes = nibbles(blocks["qs"]).astype(np.uint8)
    else:
        codes = blocks["qs"].view(np.uint8) ^ np.uint8(0x80)
    return from_codes(EQUAL[tensor.quant], codes.reshape(tensor.shape), half(blocks["d"]))


def repack(tensor: HostTensor, quant: str) -> tuple[HostTensor, str]:
    """``tensor`` as blocks of type ``quant``, and a sentence on what was done ("" if nothing).

    Other block types are requantised, and the relative error (root of summed squares) is measured and
    reported.
    """
    if tensor.dense or tensor.quant == quant:
        return tensor, ""
    if EQUAL.get(tensor.quant) == quant:
        return as_equal(tensor), ""
    rows, cols = tensor.shape
    packed = np.empty((rows, BLOCK_TYPES[quant].row_bytes(cols)), np.uint8)
    error = total = 0.0
    for part in row_chunks(rows, cols):
        piece = HostTensor(tensor.quant, (part.stop - part.start, cols), tensor.data[part])
        values = dequantize(piece)
        encoded = quantize(values, quant)
        packed[part] = encoded.data
        error += float(np.square(dequantize(encoded) - values, dtype=np.float64).sum())
        total += float(np.square(values, dtype=np.float64).sum())
    result = HostTensor(quant, (rows, cols), packed)
    relative = (error / total) ** 0.5 if total else 0.0
    return result, f"{tensor.quant} repacked as {quant}, relative error {relative:.1e}"
