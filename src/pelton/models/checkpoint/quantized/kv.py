"""Scales of quantised KV caches, by the names that vLLM, llm-compressor, AutoFP8 and ModelOpt give them."""

from __future__ import annotations

import re
from typing import Any, Literal

from pelton.ir.kv_quant import KVQuant
from pelton.models.checkpoint.quantized.settings import Settings
from pelton.models.checkpoint.quantized.stored import FLOATS, StoredTensors

_NAMES = {
    "k": (
        "self_attn.k_scale",
        "self_attn.k_proj.k_scale",
        "self_attn.attn.k_scale",
        "self_attn.k_proj.output_scale",
        "self_attn.kv_scale",
    ),
    "v": (
        "self_attn.v_scale",
        "self_attn.v_proj.v_scale",
        "self_attn.attn.v_scale",
        "self_attn.v_proj.output_scale",
        "self_attn.kv_scale",
    ),
}
_LAYER = re.compile(r"\.(\d+)\.(self_attn\..+)$")


def kv_quant(settings: Settings, stored: StoredTensors) -> tuple[KVQuant | None, list[str]]:
    """The cache's quantisation, and the stored tensors it is made of. Raises ``CheckpointError``."""
    names = [name for name in stored if (m := _LAYER.search(name)) and m[2] in {*_NAMES["k"], *_NAMES["v"]}]
    dtype = _dtype(settings)
    if not names:
        return (KVQuant(dtype) if dtype else None), []
    layers = 1 + max(int(m[1]) for name in names if (m := _LAYER.search(name)))
    found = {kind: _scales(kind, names, layers, stored) for kind in _NAMES}
    return KVQuant(dtype or "fp8", k_scales=found["k"], v_scales=found["v"]), names


def _scales(kind: str, names: list[str], layers: int, stored: StoredTensors) -> tuple[tuple[float, ...], ...]:
    scales: list[tuple[float, ...]] = []
    by_layer = {(int(m[1]), m[2]): name for name in names if (m := _LAYER.search(name))}
    for layer in range(layers):
        name = next((by_layer[layer, part] for part in _NAMES[kind] if (layer, part) in by_layer), None)
        if name is None:
            raise stored.wrong(f"has no {kind} scale of layer {layer}'s KV cache, and of other layers")
        if stored.entry(name).type not in FLOATS:
            raise stored.wrong(f"has {name} as {stored.entry(name).type}, not a float")
        scales.append(tuple(float(value) for value in stored.floats(name).reshape(-1)))
    return tuple(scales)


def _dtype(settings: Settings) -> Literal["int8", "fp8"] | None:
    """Of the config: compressed-tensors' scheme, or ModelOpt's name of an algorithm."""
    scheme: Any = settings.get("kv_cache_scheme")
    if isinstance(scheme, dict):
        own = Settings(settings.where + ", kv_cache_scheme", scheme)
        own.integer("num_bits", default=8, among=(8,))
        return "int8" if own.choice("type", known=("int", "float"), default="float") == "int" else "fp8"
    algorithm = settings.table("quantization").get("kv_cache_quant_algo") or settings.get(
        "kv_cache_quant_algo"
    )
    if algorithm in ("FP8", "fp8") or scheme in ("FP8", "fp8", "static"):
        return "fp8"
    return "int8" if algorithm in ("INT8", "int8") else None
