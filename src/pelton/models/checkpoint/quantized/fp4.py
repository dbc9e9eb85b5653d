"""E2M1 weights with scales of scales: NVFP4 and MXFP4 as compressed-tensors and ModelOpt store them.

Two codes a byte, the lower nibble first; an e4m3 scale for 16 values and one float32 of the tensor (NVFP4),
or an e8m0 one for 32 (MXFP4).
"""

from __future__ import annotations

import numpy as np

from pelton.dtypes import BLOCK_TYPES
from pelton.ir.activation_quant import ActivationQuant
from pelton.ir.blocks import row_chunks
from pelton.ir.group_blocks import from_parts
from pelton.ir.tensors import HostTensor
from pelton.models.checkpoint.quantized.stored import StoredTensors
from pelton.models.checkpoint.quantized.weight import QuantizedWeight, unpack


def fp4_weight(
    module: str,
    parts: tuple[str, ...],
    codes: str,
    scale: str,
    tensor_scale: str | None,
    stored: StoredTensors,
    *,
    divides: bool = False,
    activation: ActivationQuant | None = None,
) -> QuantizedWeight:
    """The weight of ``codes`` (N, K / 2) uint8 with ``scale`` (N, K / 16), times ``tensor_scale`` (one
    element), or divided by it (compressed-tensors); without one it is MXFP4, and ``scale`` (N, K / 32)."""
    rows, half = stored.need(codes, ("uint8",)).shape
    cols = 2 * half
    quant = "mxfp4" if tensor_scale is None else "nvfp4"
    size = BLOCK_TYPES[quant].block_size
    if cols % size:
        raise stored.wrong(f"has {codes} of {cols} columns, which do not divide into groups of {size}")
    kinds = ("float8_e4m3",) if tensor_scale is not None else ("uint8", "float8_e8m0")
    stored.need(scale, kinds, (rows, cols // size))
    header = None
    if tensor_scale is not None:
        value = stored.need_scalar(tensor_scale)
        if divides and value == 0:
            raise stored.wrong(f"has a {tensor_scale} of 0")
        header = np.float32(1) / np.float32(value) if divides else np.float32(value)

    def read() -> tuple[HostTensor, float]:
        packed, s = stored.array(codes), stored.array(scale)
        out = np.empty((rows, BLOCK_TYPES[quant].row_bytes(cols)), np.uint8)
        for part in row_chunks(rows, cols):
            q = unpack(packed[part], 4)
            d = None if header is None else np.full((len(q), 1), header, np.float32)
            out[part] = from_parts(quant, q, s[part], d).data
        return HostTensor(quant, (rows, cols), out), 0.0

    return QuantizedWeight(
        name=f"{module}.weight",
        parts=parts,
        shape=(rows, cols),
        quant=quant,
        read=read,
        activation=activation,
    )
