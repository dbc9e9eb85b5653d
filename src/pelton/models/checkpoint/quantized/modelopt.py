"""NVIDIA ModelOpt checkpoints (quant_method modelopt, or hf_quant_config.json): FP8 and NVFP4.

- FP8: weight (N, K) e4m3, weight_scale and input_scale of one element;
- NVFP4: weight (N, K / 2) uint8, weight_scale (N, K / 16) e4m3, weight_scale_2 of one element: a product.
  Its inputs are meant to be FP4 too; they are not quantised here, which is more exact.
"""

from __future__ import annotations

from collections.abc import Iterator

from pelton.ir.activation_quant import ActivationQuant
from pelton.models.checkpoint.quantized.fp4 import fp4_weight
from pelton.models.checkpoint.quantized.fp8 import fp8_weight
from pelton.models.checkpoint.quantized.settings import Settings
from pelton.models.checkpoint.quantized.stored import StoredTensors
from pelton.models.checkpoint.quantized.weight import QuantizedWeight

ALGORITHMS = ("fp8", "nvfp4", "fp8_per_channel_per_token")


def modelopt_weights(settings: Settings, stored: StoredTensors) -> Iterator[QuantizedWeight]:
    """Every quantised weight. Raises ``CheckpointError``."""
    nested = settings.table("quantization")
    settings = Settings(settings.where, nested) if nested else settings
    algorithm = settings.choice("quant_algo", known=ALGORITHMS)
    for name in stored:
        kind = stored.entry(name).type
        if not name.endswith(".weight") or kind not in ("float8_e4m3", "uint8"):
            continue
        module = name.removesuffix(".weight")
        scale, input_scale = f"{module}.weight_scale", f"{module}.input_scale"
        parts = [name, scale, *([input_scale] if input_scale in stored else [])]
        if kind == "float8_e4m3":
            if algorithm == "fp8_per_channel_per_token":
                activation = ActivationQuant("fp8")
            else:
                static = stored.need_scalar(input_scale) if input_scale in stored else 0.0
                activation = ActivationQuant("fp8", per="tensor", scale=static)
            yield fp8_weight(module, tuple(parts), name, scale, None, activation, stored)
        else:
            second = f"{module}.weight_scale_2"
            yield fp4_weight(module, (*parts, second), name, scale, second, stored)
