"""Qwen3, dense (Yang et al., 2025): Llama with a norm on every query and key head."""

from __future__ import annotations

from pelton.models.hf_config import HFConfig
from pelton.models.llama import LlamaConfig, LlamaForCausalLM
from pelton.models.qwen2 import qwen_windows


class Qwen3ForCausalLM(LlamaForCausalLM):
    """``head_dim`` is 128 unless configured, whatever the hidden size."""

    @classmethod
    def from_config(cls, hf: HFConfig, max_seq_len: int) -> Qwen3ForCausalLM:
        bias = hf.flag("attention_bias", False)
        config = LlamaConfig.read(
            hf,
            max_seq_len,
            head_dim=hf.integer("head_dim", 128),
            windows=qwen_windows(hf, max_seq_len),
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=True,
        )
        return cls(config)
