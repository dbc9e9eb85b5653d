"""bitsandbytes' layouts, as ``quantized/bitsandbytes.py`` reads them: NF4, and int8 with exact outliers."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import numpy as np

from pelton.errors import ConfigError
from pelton.ir.activation_quant import ActivationQuant
from pelton.ir.group_blocks import NF4, codes
from pelton.ir.tensors import HostTensor
from pelton.models.checkpoint.write.packing import scales_and_zeros
from pelton.models.checkpoint.write.shards import Part


class BitsAndBytes:
    """Packs weights one by one and remembers how, for the config."""

    name = "bitsandbytes"

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        self._quant = ""
        self._threshold = 6.0

    def check(
        self, module: str, quant: str, shape: tuple[int, ...], activation: ActivationQuant | None
    ) -> None:
        """Raises ``ConfigError`` for a type that has no form here, a second type, or such inputs."""
        if quant not in ("nf4_g64", "int8_row") or self._quant not in ("", quant):
            raise ConfigError(
                f"{module} is {quant}, and a bitsandbytes checkpoint is all nf4_g64 or all int8_row; give "
                "all modules one type, or choose compressed-tensors, which has int8_row among others"
            )
        self._quant = quant
        if quant == "int8_row":
            if activation is None or activation.dtype != "int8" or activation.per != "token":
                raise ConfigError(
                    f"{module} is int8_row, whose inputs bitsandbytes quantises to int8 per token; choose "
                    "compressed-tensors"
                )
        elif activation is not None:
            raise ConfigError("bitsandbytes has no quantised activations of nf4 weights")

    def pack(self, module: str, tensor: HostTensor, activation: ActivationQuant | None) -> dict[str, Part]:
        """The stored tensors by the names after the module's. Raises as ``check`` does."""
        self.check(module, tensor.quant, tensor.shape, activation)
        if tensor.quant == "int8_row":
            assert activation is not None
            self._threshold = activation.outliers
            q, d, _ = codes(tensor)
            return {
                "weight": Part("I8", q),
                "SCB": Part("F32", d[:, 0] * np.float32(127)),
                "weight_format": Part("U8", np.zeros((), np.uint8)),
            }
        q, _, _ = codes(tensor)
        d, _ = scales_and_zeros(tensor)
        state = {"quant_type": "nf4", "blocksize": 64, "dtype": self._dtype, "shape": list(tensor.shape)}
        text = np.frombuffer(json.dumps(state).encode(), np.uint8)
        return {
            "weight": Part("U8", (q[:, 0::2] << np.uint8(4) | q[:, 1::2]).reshape(-1, 1)),
            "weight.absmax": Part("F32", d.reshape(-1)),
            "weight.quant_map": Part("F32", NF4),
            "weight.quant_state.bitsandbytes__nf4": Part("U8", text),
        }

    def config(self, dense: Iterable[str]) -> dict[str, Any]:
        """The ``quantization_config``; ``dense``: linear layers that were left as they are."""
        four = self._quant == "nf4_g64"
        config: dict[str, Any] = {
            "quant_method": self.name,
            "load_in_4bit": four,
            "load_in_8bit": not four,
            "llm_int8_skip_modules": sorted(dense),
        }
        if not four:
            return {**config, "llm_int8_threshold": self._threshold}
        return {
            **config,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": False,
            "bnb_4bit_compute_dtype": self._dtype,
            "bnb_4bit_quant_storage": "uint8",
        }
