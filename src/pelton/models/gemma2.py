"""Gemma 2 (Gemma Team, 2024): norms before and after each block, soft-caps, alternating windows.

Gemma 3 is the same network with other settings, read in its own file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.nn import ModuleList

from pelton import nn
from pelton.errors import CheckpointError
from pelton.models.hf_config import HFConfig
from pelton.nn import functional as F


@dataclass(frozen=True, kw_only=True)
class Gemma2Config:
    """A decoder with four norms a layer and full and sliding layers in turn."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    activation: str
    max_position_embeddings: int
    tied: bool
    attention_bias: bool
    attention_scale: float
    attention_softcap: float
    """Of scores; 0: none."""
    logits_softcap: float
    """0: none."""
    windows: tuple[int, ...]
    """Sliding window of each layer, 0: full attention."""
    qk_norm: bool
    rope: Mapping[str, Any]
    """Of full-attention layers."""
    local_rope: Mapping[str, Any]
    """Of sliding layers."""
    slides: tuple[bool, ...]
    """Which layers slide (and so rotate by ``local_rope``), whether or not the window matters."""
    max_seq_len: int

    @staticmethod
    def read(hf: HFConfig, max_seq_len: int, slides: Sequence[bool], **fields: Any) -> Gemma2Config:
        """Read the keys Gemma 2 and 3 share; ``slides`` where ``layer_types`` is absent."""
        num_heads, num_kv_heads = hf.integer("num_attention_heads"), hf.integer("num_key_value_heads")
        if num_heads % num_kv_heads:
            raise CheckpointError(
                f"config.json: num_attention_heads {num_heads} is no multiple of "
                f"num_key_value_heads {num_kv_heads}"
            )
        window = hf.get("sliding_window", 4096)
        layer_types = hf.get("layer_types")
        if layer_types is not None:
            slides = [t == "sliding_attention" for t in layer_types]
        shared = {
            "vocab_size": hf.integer("vocab_size"),
            "hidden_size": hf.integer("hidden_size"),
            "intermediate_size": hf.integer("intermediate_size"),
            "num_layers": hf.integer("num_hidden_layers"),
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": hf.integer("head_dim", 256),
            "norm_eps": hf.number("rms_norm_eps", 1e-6),
            "activation": hf.activation("hidden_activation", "gelu_pytorch_tanh"),
            "tied": hf.flag("tie_word_embeddings", True),
            "attention_bias": hf.flag("attention_bias", False),
            "attention_scale": hf.number("query_pre_attn_scalar", 256) ** -0.5,
            "windows": hf.windows(window, slides=slides, max_seq_len=max_seq_len),
            "slides": tuple(slides),
            "max_seq_len": max_seq_len,
        }
        # Older files have both, and this one is then not read.
        hf.get("hidden_act")
        return Gemma2Config(**{**shared, **fields})


class GemmaDecoderLayer(nn.Module):
    """``x += norm(attention(norm(x))); x += norm(mlp(norm(x)))``."""

    def __init__(self, c: Gemma2Config, window: int) -> None:
        super().__init__()
        self.input_layernorm = _norm(c, c.hidden_size)
        self.self_attn = nn.Attention(
            hidden_size=c.hidden_size,
            num_heads=c.num_heads,
            num_kv_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            qkv_bias=c.attention_bias,
            out_bias=c.attention_bias,
            scale=c.attention_scale,
            window=window,
            softcap=c.attention_softcap,
            q_norm=_norm(c, c.head_dim) if c.qk_norm else None,
            k_norm=_norm(c, c.head_dim) if c.qk_norm else None,
        )
        self.post_attention_layernorm = _norm(c, c.hidden_size)
        self.pre_feedforward_layernorm = _norm(c, c.hidden_size)
        self.mlp = nn.GatedMLP(c.hidden_size, c.intermediate_size, activation=c.activation)
        self.post_feedforward_layernorm = _norm(c, c.hidden_size)

    def forward(
        self, x_TD: Any, cos_sin_TR: Any, k_cache: Any, v_cache: Any, inputs: nn.AttentionInputs
    ) -> Any:
        out_TD = self.self_attn(self.input_layernorm(x_TD), cos_sin_TR, k_cache, v_cache, inputs)
        x_TD = x_TD + self.post_attention_layernorm(out_TD)
        out_TD = self.mlp(self.pre_feedforward_layernorm(x_TD))
        return x_TD + self.post_feedforward_layernorm(out_TD)


class Gemma2Model(nn.Module):
    """Scaled embedding, layers, final norm of the rows whose logits are wanted."""

    def __init__(self, c: Gemma2Config) -> None:
        super().__init__()
        self.embedding_scale = c.hidden_size**0.5
        self.slides = c.slides
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = ModuleList(GemmaDecoderLayer(c, window) for window in c.windows)
        self.norm = _norm(c, c.hidden_size)
        self.rotary_emb = _rotary(c, c.rope)
        self.rotary_emb_local = None if c.local_rope == c.rope else _rotary(c, c.local_rope)

    def forward(
        self,
        input_ids_T: Any,
        positions_T: Any,
        k_caches: Sequence[Any],
        v_caches: Sequence[Any],
        inputs: Sequence[nn.AttentionInputs],
        logits_indices_N: Any,
    ) -> Any:
        """``inputs``: of each layer -> (N, D)."""
        x_TD = self.embed_tokens(input_ids_T) * self.embedding_scale
        full_TR = local_TR = self.rotary_emb(positions_T)
        if self.rotary_emb_local is not None:
            local_TR = self.rotary_emb_local(positions_T)
        for layer, slides, k_cache, v_cache, layer_inputs in zip(
            self.layers, self.slides, k_caches, v_caches, inputs, strict=True
        ):
            x_TD = layer(x_TD, local_TR if slides else full_TR, k_cache, v_cache, layer_inputs)
        return self.norm(F.take_rows(x_TD, logits_indices_N))


class Gemma2ForCausalLM(nn.CausalLM):
    """Layers slide in turn, the first one included, unless ``layer_types`` says otherwise."""

    def __init__(self, config: Gemma2Config) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = config.vocab_size
        self.hidden_size = config.hidden_size
        self.num_layers = config.num_layers
        self.max_position_embeddings = config.max_position_embeddings
        self.model = Gemma2Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)
        if config.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    @classmethod
    def from_config(cls, hf: HFConfig, max_seq_len: int) -> Gemma2ForCausalLM:
        rope = hf.rope()
        config = Gemma2Config.read(
            hf,
            max_seq_len,
            slides=[layer % 2 == 0 for layer in range(hf.integer("num_hidden_layers"))],
            max_position_embeddings=hf.integer("max_position_embeddings", 8192),
            attention_softcap=hf.nullable("attn_logit_softcapping", absent=50.0) or 0.0,
            logits_softcap=hf.nullable("final_logit_softcapping", absent=30.0) or 0.0,
            qk_norm=False,
            rope=rope,
            local_rope=rope,
        )
        return cls(config)

    def layer_kv(self) -> Sequence[nn.LayerKV]:
        c = self.config
        return [nn.LayerKV(c.num_kv_heads, c.head_dim, window) for window in c.windows]

    def forward(
        self,
        input_ids_T: Any,
        positions_T: Any,
        k_caches: Sequence[Any],
        v_caches: Sequence[Any],
        groups: Sequence[nn.AttentionInputs],
        logits_indices_N: Any,
    ) -> Any:
        inputs = [groups[g] for g in self.group_of_layer()]
        hidden_ND = self.model(input_ids_T, positions_T, k_caches, v_caches, inputs, logits_indices_N)
        logits_NV = self.lm_head(hidden_ND)
        cap = self.config.logits_softcap
        return F.softcap(logits_NV, cap) if cap else logits_NV


def _norm(c: Gemma2Config, dim: int) -> nn.RMSNorm:
    """Gemma stores norm weights minus one."""
    return nn.RMSNorm(dim, eps=c.norm_eps, stored_offset=1.0)


def _rotary(c: Gemma2Config, rope: Mapping[str, Any]) -> nn.RotaryEmbedding:
    inv_freq, scale = nn.rope_frequencies(
        rope,
        head_dim=c.head_dim,
        max_position_embeddings=c.max_position_embeddings,
        max_seq_len=c.max_seq_len,
    )
    return nn.RotaryEmbedding(inv_freq, scale)
