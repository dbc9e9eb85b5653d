"""A model with attention sinks as a package outside Pelton would define it, and the same in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pelton import nn, register_model
from pelton.models.hf_config import HFConfig
from pelton.models.mistral import MistralForCausalLM
from pelton.models.registry import create_model
from tests.builder.random_checkpoint import TINY_LLAMA, RandomCheckpoint

NAME = "SinkForCausalLM"
#: A layer in two has a window.
SINKS: dict[str, Any] = TINY_LLAMA | {
    "architectures": [NAME],
    "max_position_embeddings": 128,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"],
}


@register_model(NAME)
class SinkForCausalLM(MistralForCausalLM):
    """Llama whose heads have sinks."""

    @classmethod
    def from_config(cls, hf: HFConfig, max_seq_len: int) -> SinkForCausalLM:
        model = super().from_config(hf, max_seq_len)
        c = model.config
        for layer, window in zip(model.model.layers, c.windows, strict=True):
            layer.self_attn = nn.Attention(
                hidden_size=c.hidden_size,
                num_heads=c.num_heads,
                num_kv_heads=c.num_kv_heads,
                head_dim=c.head_dim,
                window=window,
                sinks=True,
            )
        return model


def sink_model() -> nn.CausalLM:
    """With random weights."""
    model = create_model(SINKS, max_seq_len=64)
    nn.load_weights(model, RandomCheckpoint(SINKS).read)
    return model


def eager_logits(config: dict[str, Any], read: Callable[[str], torch.Tensor], ids: list[int]) -> torch.Tensor:
    """(len(ids), V) float32 of one sequence, without caches."""
    heads, kv_heads, eps = (config[n] for n in ("num_attention_heads", "num_key_value_heads", "rms_norm_eps"))
    dim, tokens = config["hidden_size"] // heads, len(ids)
    norm = lambda x, name: torch.nn.functional.rms_norm(x, x.shape[-1:], read(name), eps)
    angle = torch.arange(tokens)[:, None] * config["rope_theta"] ** (-torch.arange(0, dim, 2) / dim)
    cosine, sine = angle.cos()[:, None], angle.sin()[:, None]
    behind = torch.arange(tokens)[:, None] - torch.arange(tokens)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * cosine - b * sine, b * cosine + a * sine], -1)

    x = read("model.embed_tokens.weight")[torch.tensor(ids)]
    for i, kind in enumerate(config["layer_types"]):
        layer = f"model.layers.{i}"
        h = norm(x, f"{layer}.input_layernorm.weight")
        q, k, v = ((h @ read(f"{layer}.self_attn.{n}_proj.weight").T).unflatten(1, (-1, dim)) for n in "qkv")
        q, k, v = rotate(q), *(y.repeat_interleave(heads // kv_heads, 1) for y in (rotate(k), v))
        seen = (behind >= 0) & (behind < (config["sliding_window"] if kind.startswith("sliding") else tokens))
        exps = (torch.einsum("qhd,khd->hqk", q, k) * dim**-0.5).exp() * seen
        sums = exps.sum(-1, keepdim=True) + read(f"{layer}.self_attn.sinks").exp()[:, None, None]
        out = torch.einsum("hqk,khd->qhd", exps / sums, v).flatten(1)
        x = x + out @ read(f"{layer}.self_attn.o_proj.weight").T
        h = norm(x, f"{layer}.post_attention_layernorm.weight")
        gate, up = (h @ read(f"{layer}.mlp.{n}_proj.weight").T for n in ("gate", "up"))
        x = x + (torch.nn.functional.silu(gate) * up) @ read(f"{layer}.mlp.down_proj.weight").T
    return norm(x, "model.norm.weight") @ read("model.embed_tokens.weight").T
