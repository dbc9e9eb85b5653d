"""Named recipes: ``pelton quantize --recipe NAME``, ``pelton build --quant NAME``."""

from __future__ import annotations

import difflib
from typing import Any

import msgspec

from pelton.errors import ConfigError
from pelton.ir.activation_quant import ActivationQuant
from pelton.quant.config import QuantConfig

#: Of a static activation scale: to be measured.
MEASURED = -1.0

_TOKEN8 = ActivationQuant(dtype="int8")
_TOKEN_FP8 = ActivationQuant(dtype="fp8")

_FIELDS: dict[str, dict[str, Any]] = {
    # Weights only.
    "int8": {"weights": "int8_row"},
    "int4": {"weights": "int4_g128"},
    "int4-asymmetric": {"weights": "int4_g128", "symmetric": False},
    "int3": {"weights": "int3_g128", "symmetric": False},
    "int2": {"weights": "int2_g64", "symmetric": False},
    "fp8-weights": {"weights": "fp8_row"},
    "nf4": {"weights": "nf4_g64"},
    "nf4-double": {"weights": "nf4_g64", "double_quantization": True},
    "fp4": {"weights": "fp4_g64"},
    "nvfp4": {"weights": "nvfp4"},
    "mxfp4": {"weights": "mxfp4"},
    "gptq-int8": {"weights": "int8_g128", "rounding": "gptq"},
    "gptq-int4": {"weights": "int4_g128", "rounding": "gptq"},
    "gptq-int3": {"weights": "int3_g128", "rounding": "gptq", "symmetric": False},
    "gptq-int2": {"weights": "int2_g64", "rounding": "gptq", "symmetric": False},
    "gptq-nvfp4": {"weights": "nvfp4", "rounding": "gptq"},
    "awq-int4": {"weights": "int4_g128", "scaling": "awq", "symmetric": False, "clip": True},
    "awq-int3": {"weights": "int3_g128", "scaling": "awq", "symmetric": False, "clip": True},
    "awq-gptq-int4": {"weights": "int4_g128", "scaling": "awq", "rounding": "gptq", "symmetric": False},
    # Weights and activations.
    "fp8": {"weights": "fp8_row", "activations": _TOKEN_FP8},
    "fp8-tensor": {
        "weights": "fp8_row",
        "per_tensor": True,
        "activations": ActivationQuant(dtype="fp8", per="tensor"),
    },
    "fp8-static": {
        "weights": "fp8_row",
        "per_tensor": True,
        "activations": ActivationQuant(dtype="fp8", per="tensor", scale=MEASURED),
    },
    "fp8-block": {"weights": "fp8_g128", "activations": ActivationQuant(dtype="fp8", group=128)},
    "w8a8": {"weights": "int8_row", "activations": _TOKEN8},
    "llm-int8": {"weights": "int8_row", "activations": ActivationQuant(dtype="int8", outliers=6.0)},
    "smoothquant": {"weights": "int8_row", "scaling": "smoothquant", "activations": _TOKEN8},
    "smoothquant-tensor": {
        "weights": "int8_row",
        "per_tensor": True,
        "scaling": "smoothquant",
        "activations": ActivationQuant(dtype="int8", per="tensor"),
    },
    "smoothquant-static": {
        "weights": "int8_row",
        "per_tensor": True,
        "scaling": "smoothquant",
        "activations": ActivationQuant(dtype="int8", per="tensor", scale=MEASURED),
    },
    "w4a8": {
        "weights": "int4_g128",
        "scaling": "awq",
        "symmetric": False,
        "clip": True,
        "activations": _TOKEN8,
    },
    "w4a8-fp8": {
        "weights": "int4_g128",
        "scaling": "awq",
        "symmetric": False,
        "clip": True,
        "activations": _TOKEN_FP8,
    },
    "qserve": {
        "weights": "int4_g128",
        "scaling": "smoothquant",
        "symmetric": False,
        "progressive": True,
        "activations": _TOKEN8,
    },
    # KV caches too.
    "fp8-kv": {"weights": "fp8_row", "activations": _TOKEN_FP8, "kv": "fp8"},
    "awq-int4-kv8": {
        "weights": "int4_g128",
        "scaling": "awq",
        "symmetric": False,
        "clip": True,
        "kv": "int8",
    },
    # GGUF's own types, which CPU kernels read.
    "q8_0": {"weights": "q8_0"},
    "q4_k": {"weights": "q4_k"},
    "awq-q4_k": {"weights": "q4_k", "scaling": "awq"},
}

RECIPES: dict[str, QuantConfig] = {name: QuantConfig(name=name, **f) for name, f in _FIELDS.items()}


def recipe(name: str) -> QuantConfig:
    """The recipe of that name. Raises ``ConfigError``."""
    if name not in RECIPES:
        near = difflib.get_close_matches(name, RECIPES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(RECIPES)}"
        raise ConfigError(f"there is no recipe {name!r}; {hint}")
    return RECIPES[name]


def with_fields(config: QuantConfig, **fields: Any) -> QuantConfig:
    """``config`` with the given fields, checked. Raises ``ConfigError``."""
    changed = msgspec.structs.replace(config, **fields)
    changed.check()
    return changed
