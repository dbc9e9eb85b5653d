"""GPTQ's layout, as ``quantized/gptq.py`` reads it: what GPTQModel, transformers and vLLM load."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from pelton.errors import ConfigError
from pelton.ir.activation_quant import ActivationQuant
from pelton.ir.group_blocks import bits_of, group_of
from pelton.ir.tensors import HostTensor
from pelton.models.checkpoint.write.packing import pack_words, pieces, scales_and_zeros, symmetric
from pelton.models.checkpoint.write.shards import Part


class GPTQ:
    """Packs weights one by one and remembers how, for the config.

    ``sym``: zero points are in the middle, stored as version 1 does, one less; else as version 2 does.
    ``largest_group``: larger ones are written as several of this size, so that layers whose widths allow
    different sizes have one: not every loader knows settings of single modules (``dynamic``).
    """

    name = "gptq"

    def __init__(self, *, sym: bool, largest_group: int = 128) -> None:
        self._sym, self._largest = sym, largest_group
        self._modules: dict[str, tuple[int, int]] = {}

    def check(
        self, module: str, quant: str, shape: tuple[int, ...], activation: ActivationQuant | None
    ) -> None:
        """Raises ``ConfigError`` for a type, activations or a shape that have no form here."""
        if not quant.startswith("int"):
            raise ConfigError(
                f"{module} is {quant}, and GPTQ's layout has integers only; choose compressed-tensors"
            )
        if activation is not None:
            raise ConfigError("GPTQ's layout has no quantised activations; choose compressed-tensors")
        rows, cols = shape
        bits = _bits(quant)
        if rows * bits % 32 or cols * bits % 32:
            raise ConfigError(
                f"{module} is {rows} x {cols}, and GPTQ's layout needs whole 32-bit words of {bits}-bit codes"
                "; leave it as it is (ignore), or choose compressed-tensors"
            )

    def pack(self, module: str, tensor: HostTensor, activation: ActivationQuant | None) -> dict[str, Part]:
        """The stored tensors by the names after the module's. Raises as ``check`` does, and ``ConfigError``
        for zero points of a symmetric recipe."""
        quant = tensor.quant
        self.check(module, quant, tensor.shape, activation)
        rows, cols = tensor.shape
        bits = _bits(quant)
        group = cols if quant == "int8_row" else group_of(quant)
        d, z = scales_and_zeros(tensor)
        if self._sym and not symmetric(tensor, z):
            raise ConfigError(f"{module} has zero points, and its recipe says symmetric")
        if z is None:
            z = np.full(d.shape, 1 << (bits - 1), np.uint8)
        elif group > self._largest:
            repeat, group = group // self._largest, self._largest
            d, z = np.repeat(d, repeat, axis=1), np.repeat(z, repeat, axis=1)
        words = np.empty((cols * bits // 32, rows), np.int32)
        for part, q, _, _ in pieces(tensor):
            words[:, part] = pack_words(q, bits).T
        self._modules[module] = bits, -1 if quant == "int8_row" else group
        scale = d.T.astype(np.float32 if bits == 8 else np.float16)
        return {
            "qweight": Part("I32", words),
            "qzeros": Part("I32", pack_words((z.T - np.uint8(1 if self._sym else 0)), bits)),
            "scales": Part("F32" if bits == 8 else "F16", np.ascontiguousarray(scale)),
            "g_idx": Part("I32", (np.arange(cols) // group).astype(np.int32)),
        }

    def config(self, dense: Iterable[str]) -> dict[str, Any]:
        """The ``quantization_config``; ``dense``: linear layers that were left as they are."""
        usual = Counter(self._modules.values()).most_common(1)
        bits, group = usual[0][0] if usual else (4, 128)
        dynamic: dict[str, Any] = {f"-:^{re.escape(m)}$": {} for m in dense if m != "lm_head"}
        for module, (own_bits, own_group) in self._modules.items():
            if (own_bits, own_group) != (bits, group):
                dynamic[f"+:^{re.escape(module)}$"] = {"bits": own_bits, "group_size": own_group}
        config: dict[str, Any] = {
            "quant_method": self.name,
            "bits": bits,
            "group_size": group,
            "desc_act": False,
            "sym": self._sym,
            "checkpoint_format": "gptq" if self._sym else "gptq_v2",
            "lm_head": "lm_head" in self._modules,
        }
        return {**config, "dynamic": dynamic} if dynamic else config


def _bits(quant: str) -> int:
    return 8 if quant == "int8_row" else bits_of(quant)
