"""Scales of 8-bit KV caches: the checkpoint's, where it has them for such caches, else from the keys and
values of each KV head on text, by the eager reference model; then also a vector that keys are stored without.

They are static: K and V of a head keep their range from text to text, and what a later text has beyond it
becomes the largest code.
"""

from __future__ import annotations

import math
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from pelton import nn
from pelton.builder.attended_keys import AttendedKeys, profile
from pelton.builder.evaluation import exact_model, windows
from pelton.builder.facts import model_config
from pelton.builder.probe import sample_tokens
from pelton.builder.text import BUILT_IN, Text, built_in, encode
from pelton.engine.config import BuildConfig, EngineConfig, MemoryPlan
from pelton.errors import CheckpointError, ConfigError
from pelton.ir import kv_codes
from pelton.ir.kv_codes import LARGEST, scale_of
from pelton.ir.kv_quant import CACHE_DTYPE
from pelton.models.checkpoint import Checkpoint
from pelton.models.registry import architecture_of

Scales = dict[int, tuple[list[float], list[float]]]
"""By layer, of K and of V of each KV head."""
Rounding = dict[int, tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]]
"""By layer, what is taken from the keys of each KV head before they are stored (KV heads, head_dim), and
which queries they meet (KV heads, 2 head_dim): ``k_shift`` and ``k_queries`` of ``kv_write``."""

#: Tokens of text that are read, as one sequence: of two shorter ones attention heeds less what it heeds
#: in longer ones.
TOKENS = 512
#: Values are kept as float16 meanwhile.
_MOST = 65504.0


def checkpoint_scales(checkpoint: Checkpoint, model: nn.CausalLM, kv_dtype: str) -> Scales | None:
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


def unmeasured_scales(model: nn.CausalLM) -> Scales:
    """Ones for each layer, where a dry run reads no values."""
    ones = {layer: [1.0] * kv.num_kv_heads for layer, kv in enumerate(model.layer_kv())}
    return {layer: (list(values), list(values)) for layer, values in ones.items()}


def unmeasured_rounding(model: nn.CausalLM) -> Rounding:
    """Zeros for each layer, where a dry run reads no values; ``quantise_kv`` knows which layers have none."""
    return {
        i: (
            np.zeros((kv.num_kv_heads, kv.head_dim), np.float32),
            np.zeros((kv.num_kv_heads, 2 * kv.head_dim), np.float32),
        )
        for i, kv in enumerate(model.layer_kv())
    }


def _attentions(model: nn.CausalLM) -> list[nn.Attention]:
    """Of each layer, where they are Pelton's own."""
    return [m for m in model.modules() if isinstance(m, nn.Attention)]


def with_float32_caches(config: EngineConfig) -> EngineConfig:
    """``config`` for a reference that rounds nothing."""
    return msgspec.structs.replace(config, build=msgspec.structs.replace(config.build, kv_dtype="float32"))


@dataclass(frozen=True)
class SeenKV:
    """Keys and values of a text, of each layer (KV heads, tokens, head_dim), float16."""

    k: list[torch.Tensor]
    v: list[torch.Tensor]
    shift: dict[int, torch.Tensor]
    """By layer, what is taken from the keys (KV heads, head_dim), float32; absent: nothing may be."""
    grams: dict[int, torch.Tensor]
    """By layer that has a shift, of its queries (``AttendedKeys.grams``)."""
    first: list[torch.Tensor]
    """Of each layer, the keys of the texts' first tokens, their mean (KV heads, head_dim), float32."""

    def key_sizes(self) -> dict[int, npt.NDArray[np.float32]]:
        """By layer, the largest magnitude of each channel of the shifted keys (KV heads, head_dim)."""
        return {layer: self._shifted(layer).abs().amax(dim=1).numpy() for layer in range(len(self.k))}

    def scales(self, model: nn.CausalLM, kv_dtype: str) -> tuple[Scales, Rounding]:
        """Of caches of ``kv_dtype``, for keys as ``model`` makes them after ``smooth_keys``."""
        factors = [m.key_factors for m in _attentions(model)]
        dtype, found, rounding = getattr(torch, kv_dtype), {}, {}
        for layer, v in enumerate(self.v):
            k = self._shifted(layer)
            by_channel = torch.ones(k.shape[0], k.shape[2])
            if factors and factors[layer] is not None:
                by_channel = torch.from_numpy(factors[layer]).float()
                k = k / by_channel[:, None]
            scale = scale_of(k, dtype)
            found[layer] = scale.tolist(), scale_of(v, dtype, relative=True).tolist()
            if layer in self.shift:
                first, shift = self.first[layer] / by_channel, self.shift[layer] / by_channel
                gram = self.grams[layer] * by_channel[:, :, None] * by_channel[:, None]
                rounding[layer] = on_a_code(first, shift, scale, dtype).numpy(), profile(gram).numpy()
        return found, rounding

    def _shifted(self, layer: int) -> torch.Tensor:
        k, shift = self.k[layer].float(), self.shift.get(layer)
        return k if shift is None else k - shift[:, None]

    def of_layers(self, kv_dtype: str) -> list[tuple[float, float]]:
        """One scale for the keys and one for the values of each layer, for caches of ``kv_dtype``."""
        dtype = getattr(torch, kv_dtype)
        found = []
        for k, v in zip(self.k, self.v, strict=True):
            one_k, one_v = (x.reshape(1, -1, x.shape[-1]) for x in (k, v))
            found.append((float(scale_of(one_k, dtype)), float(scale_of(one_v, dtype, relative=True))))
        return found


def see(checkpoint: Checkpoint, model: nn.CausalLM, build: BuildConfig, *, rounding: bool = True) -> SeenKV:
    """The keys and values that the exact model makes of some text; streams it once.

    ``rounding=False``: for caches that hold keys as they are.
    """
    # The exact model takes steps of any size.
    build = msgspec.structs.replace(build, max_num_tokens=TOKENS, profiles=None)
    described = model_config(checkpoint, model, architecture_of(checkpoint.config), None)
    memory = MemoryPlan(weights=0, arena=0, workspace=0, kv_bytes_per_token=0)
    config = EngineConfig(model=described, build=build, memory=memory)
    reference = exact_model(checkpoint, config, TOKENS)
    first: list[list[torch.Tensor]] = [[] for _ in reference.k_caches]
    k: list[list[torch.Tensor]] = [[] for _ in reference.k_caches]
    v: list[list[torch.Tensor]] = [[] for _ in reference.v_caches]
    attended = AttendedKeys(reference.k_caches)
    for batch in windows(_text(checkpoint, config), config, TOKENS):
        with attended if rounding else nullcontext():
            reference.run(batch)
        for parts, cache in zip(first, reference.k_caches, strict=True):
            parts.append(cache[0, :, 0].clone())
        for seen, caches in ((k, reference.k_caches), (v, reference.v_caches)):
            for parts, cache in zip(seen, caches, strict=True):
                by_head = cache.transpose(0, 1).flatten(1, 2)
                # Slots that no token has taken are NaN.
                taken = ~by_head[0, :, 0].isnan()
                parts.append(by_head[:, taken].clamp(-_MOST, _MOST).half())
    return SeenKV(
        k=[torch.cat(parts, 1) for parts in k],
        v=[torch.cat(parts, 1) for parts in v],
        shift=attended.means(),
        grams=attended.grams(),
        first=[torch.stack(parts).mean(0) for parts in first],
    )


def on_a_code(
    key: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """``shift`` moved by at most half a step, so that a code stands for ``key`` less it: all (Hkv, D).

    For the first token's key, which is much the same in all texts, far from other keys, and has a quarter of
    the attention: else its rounding is half of what an fp8 cache does to logits.
    """
    moved = key - kv_codes.decode(kv_codes.encode(key, dtype, scale, shift), scale)
    # Beyond the largest code there is none.
    inside = (key - shift).abs() <= LARGEST[dtype] * scale[:, None]
    return torch.where(inside, moved, shift)


def _text(checkpoint: Checkpoint, config: EngineConfig) -> Text:
    with tempfile.TemporaryDirectory() as name:
        tokenizer = Path(name)
        checkpoint.write_tokenizer(tokenizer)
        try:
            content = built_in(0)[: 16 * TOKENS]
            text = encode(content, tokenizer, config.model.vocab_size, name=BUILT_IN)
            return text.head(TOKENS - text.first.size)
        except ConfigError:  # no usable tokenizer
            rng = np.random.default_rng(0)
            ids = sample_tokens(tokenizer, config.model.vocab_size, TOKENS, rng)
            return Text(ids, ids[:0])
