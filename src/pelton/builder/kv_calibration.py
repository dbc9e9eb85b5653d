"""Scales of 8-bit KV caches: the checkpoint's, where it has them for such caches, else the largest key and
value of each KV head on text, by the eager reference model.

They are static: K and V of a head keep their range from text to text, and what a later text has beyond it
becomes the largest code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from pelton import nn
from pelton.builder.evaluation import exact_model, windows
from pelton.builder.probe import sample_tokens
from pelton.builder.text import BUILT_IN, built_in, encode
from pelton.builder.weights import WeightSpec
from pelton.engine.config import EngineConfig
from pelton.errors import CheckpointError, ConfigError
from pelton.ir.kv_codes import scale_of
from pelton.ir.kv_quant import CACHE_DTYPE
from pelton.models.checkpoint import Checkpoint

#: Tokens of text that are read.
TOKENS = 512
#: Values are kept as float16 meanwhile.
_MOST = 65504.0


def checkpoint_scales(
    checkpoint: Checkpoint, model: nn.CausalLM, kv_dtype: str
) -> dict[int, tuple[list[float], list[float]]] | None:
    """The checkpoint's own scales of each layer's heads; None where it has none for caches of ``kv_dtype``.

    Raises ``CheckpointError`` where they do not fit the model.
    """
    kv = checkpoint.kv_quant()
    if kv is None or not kv.k_scales or CACHE_DTYPE[kv.dtype] != kv_dtype:
        return None
    heads = [layer.num_kv_heads for layer in model.layer_kv()]
    found = {}
    for name, scales in (("k", kv.k_scales), ("v", kv.v_scales)):
        fit = len(scales) == len(heads) and all(len(s) in (1, n) for s, n in zip(scales, heads, strict=True))
        if not fit or not all(value > 0 and math.isfinite(value) for s in scales for value in s):
            raise CheckpointError(
                f"{checkpoint.name} has {name} scales of KV caches that do not fit its {len(heads)} layers "
                f"of {heads[0]} heads; use another kv_dtype"
            )
        found[name] = [list(s) * (n // len(s)) for s, n in zip(scales, heads, strict=True)]
    return {layer: (found["k"][layer], found["v"][layer]) for layer in range(len(heads))}


def unmeasured_scales(model: nn.CausalLM) -> dict[int, tuple[list[float], list[float]]]:
    """Ones for each layer, which stand in the plan until ``measured_weights`` knows better."""
    ones = {layer: [1.0] * kv.num_kv_heads for layer, kv in enumerate(model.layer_kv())}
    return {layer: (list(values), list(values)) for layer, values in ones.items()}


def with_float32_caches(config: EngineConfig) -> EngineConfig:
    """``config`` for a reference that rounds nothing."""
    return msgspec.structs.replace(config, build=msgspec.structs.replace(config.build, kv_dtype="float32"))


def measured_weights(
    weights: Sequence[WeightSpec], config: EngineConfig, checkpoint: Checkpoint, tokenizer: Path
) -> tuple[WeightSpec, ...]:
    """``weights`` with the scales that this model's keys and values want; streams the model once a window."""
    assert config.build.kv_dtype
    reference = exact_model(checkpoint, config)
    seen: dict[str, list[torch.Tensor]] = {}
    for batch in windows(_tokens(config, tokenizer), config):
        reference.run(batch)
        for kind, caches in (("k", reference.k_caches), ("v", reference.v_caches)):
            for layer, cache in enumerate(caches):
                # Slots that no token has taken are NaN.
                by_head = cache.transpose(0, 1).flatten(1)
                taken = ~by_head[0].isnan()
                seen.setdefault(f"{kind}_scale.{layer}", []).append(
                    by_head[:, taken].clamp(-_MOST, _MOST).half()
                )
    dtype = getattr(torch, config.build.kv_dtype)
    scales = {name: scale_of(torch.cat(values, 1), dtype).numpy() for name, values in seen.items()}
    return tuple(replace(w, source=scales[w.name]) if w.name in scales else w for w in weights)


def _tokens(config: EngineConfig, tokenizer: Path) -> npt.NDArray[np.int32]:
    try:
        text = built_in(0)[: 16 * TOKENS]
        return encode(text, tokenizer, config.model.vocab_size, name=BUILT_IN)[:TOKENS]
    except ConfigError:  # no usable tokenizer
        return sample_tokens(tokenizer, config.model.vocab_size, TOKENS, np.random.default_rng(0))
