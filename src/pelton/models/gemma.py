"""Gemma 1 (Gemma Team, 2024): Llama with scaled embeddings, GeGLU and norms stored minus one."""

from __future__ import annotations

from pelton.models.hf_config import HFConfig
from pelton.models.llama import LlamaConfig, LlamaForCausalLM


class GemmaForCausalLM(LlamaForCausalLM):
    """The head is tied unless the configuration says otherwise."""

    @classmethod
    def from_config(cls, hf: HFConfig, max_seq_len: int) -> GemmaForCausalLM:
        bias = hf.flag("attention_bias", False)
        config = LlamaConfig.read(
            hf,
            max_seq_len,
            head_dim=hf.integer("head_dim", 256),
            max_position_embeddings=hf.integer("max_position_embeddings", 8192),
            activation=_activation(hf),
            tied=hf.flag("tie_word_embeddings", True),
            qkv_bias=bias,
            out_bias=bias,
            norm_offset=1.0,
            embedding_scale=hf.integer("hidden_size") ** 0.5,
        )
        return cls(config)


def _activation(hf: HFConfig) -> str:
    """The first files said "gelu" and meant its tanh form, which ``hidden_activation`` names since."""
    if hf.get("hidden_activation") is not None:
        hf.get("hidden_act")
        return hf.activation("hidden_activation", "gelu_pytorch_tanh")
    kind = hf.activation("hidden_act", "gelu_pytorch_tanh")
    return "gelu_tanh" if kind == "gelu" else kind
