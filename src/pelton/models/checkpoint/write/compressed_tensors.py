"""compressed-tensors, as ``quantized/compressed_tensors.py`` reads it: what vLLM and transformers load."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from pelton.errors import ConfigError
from pelton.ir.activation_quant import ActivationQuant
from pelton.ir.group_blocks import bits_of, codes, group_of, parts
from pelton.ir.tensors import HostTensor
from pelton.models.checkpoint.write.packing import pack_words, pieces, scales_and_zeros, symmetric
from pelton.models.checkpoint.write.shards import Part

_SCALE = {np.dtype(np.float16): "F16", np.dtype(np.float32): "F32"}


class CompressedTensors:
    """Packs weights one by one and remembers how, for the config."""

    name = "compressed-tensors"

    def __init__(self, kv: str | None = None) -> None:
        """``kv``: type of KV caches (int8 or fp8), with one scale for each layer's keys and values."""
        self._kv = kv
        self._modules: dict[str, dict[str, Any]] = {}

    def check(
        self, module: str, quant: str, shape: tuple[int, ...], activation: ActivationQuant | None
    ) -> None:
        """Raises ``ConfigError`` for a type or activations that have no form here."""
        _activation(activation)
        if not quant.startswith(("int", "fp8", "nvfp4", "mxfp4")):
            raise ConfigError(
                f"{module} is {quant}, which compressed-tensors does not have (it has integers, fp8, nvfp4 "
                "and mxfp4); choose another format or type"
            )

    def pack(self, module: str, tensor: HostTensor, activation: ActivationQuant | None) -> dict[str, Part]:
        """The stored tensors by the names after the module's. Raises as ``check`` does, and ``ConfigError``
        for nvfp4 with several scales of the tensor."""
        quant = tensor.quant
        self.check(module, quant, tensor.shape, activation)
        inputs, static = _activation(activation)
        if quant == "int8_row" and inputs is not None:
            form, weights, found = "int-quantized", {"num_bits": 8, "type": "int"}, _plain(tensor, "I8")
            weights |= {"strategy": "channel"}
        elif quant.startswith("int"):
            form, (weights, found) = "pack-quantized", _packed(tensor)
        elif quant.startswith("fp8"):
            form, (weights, found) = "float-quantized", _fp8(tensor)
        else:
            form, (weights, found) = f"{quant}-pack-quantized", _fp4(tensor)
        symmetry = {"symmetric": weights.pop("symmetric", True), "dynamic": False}
        self._modules[module] = {
            "weights": {**weights, **symmetry},
            "input_activations": inputs,
            "output_activations": None,
            "format": form,
        }
        if static is not None:
            found["input_scale"] = Part("F32", np.array([static], np.float32))
        return found

    def config(self, dense: Iterable[str]) -> dict[str, Any]:
        """The ``quantization_config``; ``dense``: linear layers that were left as they are."""
        schemes: list[tuple[dict[str, Any], list[str]]] = []
        for module, scheme in self._modules.items():
            names = next((names for other, names in schemes if other == scheme), None)
            if names is None:
                schemes.append((scheme, [module]))
            else:
                names.append(module)
        forms = {str(scheme["format"]) for scheme, _ in schemes}
        groups = {
            f"group_{i}": {**scheme, "targets": ["Linear"] if len(schemes) == 1 else names}
            for i, (scheme, names) in enumerate(schemes)
        }
        return {
            "quant_method": self.name,
            "format": forms.pop() if len(forms) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": sorted(dense),
            "kv_cache_scheme": None if self._kv is None else _kv_scheme(self._kv),
        }


def _kv_scheme(kv: str) -> dict[str, Any]:
    kind = "int" if kv == "int8" else "float"
    return {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "tensor", "dynamic": False}


def _activation(activation: ActivationQuant | None) -> tuple[dict[str, Any] | None, float | None]:
    """How inputs are quantised in the config, and their static scale."""
    if activation is None:
        return None, None
    if activation.outliers:
        raise ConfigError(
            "outliers that stay exact (LLM.int8) have no form in compressed-tensors; choose bitsandbytes"
        )
    static = activation.scale if activation.scale > 0 else None
    values: dict[str, Any] = {
        "num_bits": 8,
        "type": "int" if activation.dtype == "int8" else "float",
        "symmetric": True,
        "strategy": "group" if activation.group else activation.per,
        "dynamic": static is None,
    }
    if activation.group:
        values["group_size"] = activation.group
    return values, static


def _packed(tensor: HostTensor) -> tuple[dict[str, Any], dict[str, Part]]:
    rows, cols = tensor.shape
    bits = 8 if tensor.quant == "int8_row" else bits_of(tensor.quant)
    group = 0 if tensor.quant == "int8_row" else group_of(tensor.quant)
    d, z = scales_and_zeros(tensor)
    words = np.empty((rows, -(-cols * bits // 32)), np.int32)
    for part, q, _, _ in pieces(tensor):
        words[part] = pack_words(q, bits)
    scale = d.astype(np.float32 if bits == 8 else np.float16)
    found = {
        "weight_packed": Part("I32", words),
        "weight_scale": Part(_SCALE[scale.dtype], scale),
        "weight_shape": Part("I64", np.array([rows, cols], np.int64)),
    }
    weights: dict[str, Any] = {"num_bits": bits, "type": "int"}
    weights |= {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    if not symmetric(tensor, z):
        assert z is not None
        found["weight_zero_point"] = Part("I32", np.ascontiguousarray(pack_words(z.T.copy(), bits).T))
        weights["symmetric"] = False
    return weights, found


def _plain(tensor: HostTensor, kind: str) -> dict[str, Part]:
    """A byte a value and a scale a row."""
    q, d, _ = codes(tensor)
    return {"weight": Part(kind, q), "weight_scale": Part("F32", d)}


def _fp8(tensor: HostTensor) -> tuple[dict[str, Any], dict[str, Part]]:
    found, weights = _plain(tensor, "F8_E4M3"), {"num_bits": 8, "type": "float"}
    d = found["weight_scale"].data
    if tensor.quant == "fp8_row":
        if (d == d[0]).all():
            found["weight_scale"] = Part("F32", d[0])
            return {**weights, "strategy": "tensor"}, found
        return {**weights, "strategy": "channel"}, found
    first = d[::128]
    if np.array_equal(np.repeat(first, 128, axis=0)[: len(d)], d):
        found["weight_scale"] = Part("F32", first)
        return {**weights, "strategy": "block", "block_structure": [128, 128]}, found
    return {**weights, "strategy": "group", "group_size": 128}, found


def _fp4(tensor: HostTensor) -> tuple[dict[str, Any], dict[str, Part]]:
    q, s, header = parts(tensor)
    found = {"weight_packed": Part("U8", q[:, 0::2] | q[:, 1::2] << np.uint8(4))}
    weights: Mapping[str, Any] = {"num_bits": 4, "type": "float"}
    if header is None:
        found["weight_scale"] = Part("U8", s)
        return {**weights, "strategy": "group", "group_size": 32}, found
    if not (header == header[0]).all():
        raise ConfigError(
            "nvfp4 weights of compressed-tensors have one scale for the tensor, and these several"
        )
    found["weight_scale"] = Part("F8_E4M3", s)
    found["weight_global_scale"] = Part("F32", np.float32(1) / header[0])
    return {**weights, "strategy": "tensor_group", "group_size": 16}, found
