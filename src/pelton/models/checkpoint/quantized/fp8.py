"""fp8 weights: e4m3 codes with a scale for the tensor, a row or a block (quant_method fp8, fbgemm_fp8).

- DeepSeek, Qwen: weight (N, K) and weight_scale_inv (ceil(N / 128), ceil(K / 128)), whose product it is;
  inputs are quantised per token and 128 columns as they come.
- AutoFP8 and others: weight_scale of one element or one a row; input_scale, one element, where static.
- fbgemm: weight_scale one a row, inputs per token.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pelton.dtypes import BLOCK_TYPES
from pelton.ir.activation_quant import ActivationQuant
from pelton.ir.blocks import row_chunks
from pelton.ir.group_blocks import E4M3, from_codes
from pelton.ir.tensors import HostTensor
from pelton.models.checkpoint.quantized.settings import Settings
from pelton.models.checkpoint.quantized.stored import SCALES, Float32, StoredTensors, dims
from pelton.models.checkpoint.quantized.weight import QuantizedWeight


def fp8_weights(settings: Settings, stored: StoredTensors) -> Iterator[QuantizedWeight]:
    """Every e4m3 weight. Raises ``CheckpointError``."""
    scheme = settings.choice("activation_scheme", known=("dynamic", "static"), default="dynamic")
    block = _block(settings)
    for name in stored:
        if not name.endswith(".weight") or not stored.entry(name).type.startswith("float8"):
            continue
        module = name.removesuffix(".weight")
        inverse = f"{module}.weight_scale_inv"
        scale = inverse if inverse in stored else f"{module}.weight_scale"
        parts = [name, scale]
        input_scale = f"{module}.input_scale"
        if input_scale in stored:
            parts.append(input_scale)
        if scheme == "static":
            activation = ActivationQuant("fp8", per="tensor", scale=stored.need_scalar(input_scale))
        elif block is not None:
            activation = ActivationQuant("fp8", group=block[1])
        else:
            activation = ActivationQuant("fp8")
        yield fp8_weight(module, tuple(parts), name, scale, block, activation, stored)


def fbgemm_weights(settings: Settings, stored: StoredTensors) -> Iterator[QuantizedWeight]:
    """Every e4m3 weight, with a scale a row. Raises ``CheckpointError``."""
    for name in stored:
        if name.endswith(".weight") and stored.entry(name).type.startswith("float8"):
            module = name.removesuffix(".weight")
            scale = f"{module}.weight_scale"
            parts = [name, scale]
            if f"{module}.input_scale_ub" in stored:
                parts.append(f"{module}.input_scale_ub")
            yield fp8_weight(module, tuple(parts), name, scale, None, ActivationQuant("fp8"), stored)


def _block(settings: Settings) -> tuple[int, int] | None:
    value = settings.get("weight_block_size")
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(v, int) and v > 0 for v in value):
        raise settings.wrong("weight_block_size", value, "two sizes, of rows and columns")
    return value[0], value[1]


def fp8_weight(
    module: str,
    parts: tuple[str, ...],
    codes: str,
    scale: str,
    block: tuple[int, int] | None,
    activation: ActivationQuant | None,
    stored: StoredTensors,
) -> QuantizedWeight:
    """The weight of e4m3 ``codes`` (N, K) times ``scale``: (), (1,), (N,), (N, 1), or one a ``block``."""
    rows, cols = stored.need(codes, ("float8_e4m3",)).shape
    if scale not in stored:
        raise stored.wrong(f"has no tensor {scale}, which its quantised weight needs")
    found, in_blocks = stored.entry(scale).shape, block is not None
    if np.prod(found, dtype=int) == 1 and block is None:
        block = (rows, cols)
    elif found in ((rows,), (rows, 1)) and block is None:
        block = (1, cols)
    elif block is None:
        raise stored.wrong(
            f"has {scale} of shape {dims(found)} for {rows} x {cols} values, and no weight_block_size"
        )
    else:
        found_blocks = (-(-rows // block[0]), -(-cols // block[1]))
        stored.need(scale, SCALES, found_blocks)
    stored.need(scale, SCALES, found)
    height, width = block
    if width % 128 == 0 and cols % 128 == 0 and in_blocks:
        quant = "fp8_g128"
    elif width >= cols:
        quant = "fp8_row"
    else:
        quant = f"fp8_{height}x{width}"

    def read() -> tuple[HostTensor, float]:
        d = stored.floats(scale).reshape(-(-rows // height), -(-cols // width))
        return _read(quant, stored, codes, np.repeat(d, height, axis=0)[:rows], width), 0.0

    return QuantizedWeight(
        name=f"{module}.weight",
        parts=parts,
        shape=(rows, cols),
        quant=quant,
        read=read,
        activation=activation,
    )


def _read(quant: str, stored: StoredTensors, codes: str, d: Float32, width: int) -> HostTensor:
    """``d``: (rows, blocks of ``width`` columns)."""
    q = stored.array(codes)
    rows, cols = q.shape
    block = BLOCK_TYPES.get(quant)
    if block is None:
        out = np.empty((rows, cols), np.float32)
        for part in row_chunks(rows, cols):
            out[part] = E4M3[q[part]] * np.repeat(d[part], width, axis=1)[:, :cols]
        return HostTensor("float32", (rows, cols), out)
    packed = np.empty((rows, block.row_bytes(cols)), np.uint8)
    groups = 1 if quant == "fp8_row" else cols // block.block_size
    for part in row_chunks(rows, cols):
        repeated = np.repeat(d[part], max(1, width // block.block_size) if groups > 1 else 1, axis=1)
        packed[part] = from_codes(quant, q[part], repeated[:, :groups]).data
    return HostTensor(quant, (rows, cols), packed)
