"""Rounding to nearest (RTN), and the scales that every algorithm starts from.

A weight is (rows, K): output features by input features, groups along K.
"""

from __future__ import annotations

import numpy as np

from pelton.dtypes import GGUF_BLOCK_TYPES
from pelton.ir import block_encoder
from pelton.ir.blocks import dequantize
from pelton.ir.group_blocks import Float32
from pelton.ir.group_encoder import Scales, encode_with, fit, into_groups, rounded_with
from pelton.ir.tensors import HostTensor

#: Rows that share a scale of fp8_g128, as many as columns do.
BLOCK_ROWS = 128


def round_nearest(
    weight: Float32,
    quant: str,
    *,
    symmetric: bool = True,
    per_tensor: bool = False,
    row: Float32 | None = None,
) -> HostTensor:
    """``weight`` in the nearest codes of ``quant``, with scales that span each group's range.

    ``row``: as ``fit_weight``'s.
    """
    if quant in GGUF_BLOCK_TYPES:
        return block_encoder.quantize(weight, quant)
    scales = fit_weight(weight, quant, symmetric=symmetric, per_tensor=per_tensor, row=row)
    return encode_with(into_groups(weight, quant), scales, quant)


def nearest_values(
    weight: Float32, quant: str, *, symmetric: bool = True, per_tensor: bool = False
) -> Float32:
    """The values that ``round_nearest`` stores, without packing them."""
    if quant in GGUF_BLOCK_TYPES:
        return dequantize(block_encoder.quantize(weight, quant))
    scales = fit_weight(weight, quant, symmetric=symmetric, per_tensor=per_tensor)
    return rounded_with(into_groups(weight, quant), scales, quant).reshape(weight.shape)


def fit_weight(
    weight: Float32,
    quant: str,
    *,
    symmetric: bool = True,
    per_tensor: bool = False,
    outwards: bool = True,
    row: Float32 | None = None,
) -> Scales:
    """The scales of a weight; of fp8_g128, and with ``per_tensor`` of row types, shared between rows.

    ``outwards``: as ``integer_scales``'s. ``row``: nvfp4's header (rows, 1), where it is not to be that of
    these values: ``weight`` is a part of a tensor's columns, or shares it with other tensors.
    """
    scales = fit(into_groups(weight, quant), quant, symmetric=symmetric, outwards=outwards, row=row)
    rows = len(weight)
    shared = rows if per_tensor else BLOCK_ROWS if quant == "fp8_g128" else 1
    if shared == 1:
        return scales
    starts = np.arange(0, rows, shared)
    tops = np.maximum.reduceat(scales.d, starts, axis=0)
    return scales._replace(d=np.repeat(tops, np.diff([*starts, rows]), axis=0))
