"""Llama 1 to 3.x (Touvron et al., 2023) and the models of the same shape, SmolLM among them.

Mistral, Qwen2, Qwen3 and Phi-3 differ in a few fields of ``LlamaConfig``, read in their own files.
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
class LlamaConfig:
    """A pre-norm decoder with RMSNorm, RoPE and a gated MLP."""

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
    """The language-model head is the embedding table."""
    rope: Mapping[str, Any]
    max_seq_len: int
    """Of the engine: fixes length-dependent RoPE tables and which windows matter."""
    windows: tuple[int, ...]
    """Sliding window of each layer, 0: full attention."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm of each query and key head before the rotation."""
    packed: bool = False
    """The checkpoint stacks q, k, v, and gate, up."""
    norm_offset: float = 0.0
    """What the checkpoint leaves out of norm weights (Gemma: 1)."""
    embedding_scale: float = 1.0
    """Embeddings are multiplied by this (Gemma)."""

    @staticmethod
    def read(hf: HFConfig, max_seq_len: int, **fields: Any) -> LlamaConfig:
        """Read the keys all models of this shape share; ``fields`` are the model's own."""
        num_heads = hf.integer("num_attention_heads")
        num_kv_heads = hf.integer("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise CheckpointError(
                f"config.json: num_attention_heads {num_heads} is no multiple of "
                f"num_key_value_heads {num_kv_heads}"
            )
        hidden_size, num_layers = hf.integer("hidden_size"), hf.integer("num_hidden_layers")
        shared = {
            "vocab_size": hf.integer("vocab_size"),
            "hidden_size": hidden_size,
            "intermediate_size": hf.integer("intermediate_size"),
            "num_layers": num_layers,
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": hf.integer("head_dim", hidden_size // num_heads),
            "norm_eps": hf.number("rms_norm_eps", 1e-6),
            "activation": hf.activation("hidden_act", "silu"),
            "max_position_embeddings": hf.integer("max_position_embeddings", 2048),
            "tied": hf.flag("tie_word_embeddings", False),
            "rope": hf.rope(),
            "max_seq_len": max_seq_len,
            "windows": (0,) * num_layers,
        }
        return LlamaConfig(**{**shared, **fields})


class DecoderLayer(nn.Module):
    """``x += attention(norm(x)); x += mlp(norm(x))``."""

    def __init__(self, c: LlamaConfig, window: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(c.hidden_size, eps=c.norm_eps, stored_offset=c.norm_offset)
        self.self_attn = nn.Attention(
            hidden_size=c.hidden_size,
            num_heads=c.num_heads,
            num_kv_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            qkv_bias=c.qkv_bias,
            out_bias=c.out_bias,
            window=window,
            q_norm=nn.RMSNorm(c.head_dim, eps=c.norm_eps) if c.qk_norm else None,
            k_norm=nn.RMSNorm(c.head_dim, eps=c.norm_eps) if c.qk_norm else None,
            packed=c.packed,
        )
        self.post_attention_layernorm = nn.RMSNorm(c.hidden_size, eps=c.norm_eps, stored_offset=c.norm_offset)
        self.mlp = nn.GatedMLP(
            c.hidden_size, c.intermediate_size, activation=c.activation, bias=c.mlp_bias, packed=c.packed
        )

    def forward(
        self, x_TD: Any, cos_sin_TR: Any, k_cache: Any, v_cache: Any, inputs: nn.AttentionInputs
    ) -> Any:
        x_TD = x_TD + self.self_attn(self.input_layernorm(x_TD), cos_sin_TR, k_cache, v_cache, inputs)
        return x_TD + self.mlp(self.post_attention_layernorm(x_TD))


class LlamaModel(nn.Module):
    """Embedding, layers, final norm of the rows whose logits are wanted."""

    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.embedding_scale = c.embedding_scale
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = ModuleList(DecoderLayer(c, window) for window in c.windows)
        self.norm = nn.RMSNorm(c.hidden_size, eps=c.norm_eps, stored_offset=c.norm_offset)
        self.rotary_emb = nn.RotaryEmbedding(
            *nn.rope_frequencies(
                c.rope,
                head_dim=c.head_dim,
                max_position_embeddings=c.max_position_embeddings,
                max_seq_len=c.max_seq_len,
            )
        )

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
        x_TD = self.embed_tokens(input_ids_T)
        if self.embedding_scale != 1.0:
            x_TD = x_TD * self.embedding_scale
        cos_sin_TR = self.rotary_emb(positions_T)
        for layer, k_cache, v_cache, layer_inputs in zip(
            self.layers, k_caches, v_caches, inputs, strict=True
        ):
            x_TD = layer(x_TD, cos_sin_TR, k_cache, v_cache, layer_inputs)
        return self.norm(F.take_rows(x_TD, logits_indices_N))


class LlamaForCausalLM(nn.CausalLM):
    """The architectures of this shape; subclasses read their own configuration."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = config.vocab_size
        self.hidden_size = config.hidden_size
        self.num_layers = config.num_layers
        self.max_position_embeddings = config.max_position_embeddings
        self.model = LlamaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)
        if config.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    @classmethod
    def from_config(cls, hf: HFConfig, max_seq_len: int) -> LlamaForCausalLM:
        """``attention_bias`` puts a bias on q, k, v and o, ``mlp_bias`` on the three of the MLP."""
        bias = hf.flag("attention_bias", False)
        config = LlamaConfig.read(
            hf, max_seq_len, qkv_bias=bias, out_bias=bias, mlp_bias=hf.flag("mlp_bias", False)
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
        return self.lm_head(hidden_ND)
