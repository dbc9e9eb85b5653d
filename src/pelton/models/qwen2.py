"""Qwen2 and Qwen2.5 (Yang et al., 2024): Llama with biases on q, k and v."""

from __future__ import annotations

from pelton.models.hf_config import HFConfig
from pelton.models.llama import LlamaConfig, LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    """With ``use_sliding_window``, layers from ``max_window_layers`` on slide."""

    @classmethod
    def from_config(cls, hf: HFConfig, max_seq_len: int) -> Qwen2ForCausalLM:
        hf.expect("use_mrope", None, False)
        return cls(LlamaConfig.read(hf, max_seq_len, windows=qwen_windows(hf, max_seq_len), qkv_bias=True))


def qwen_windows(hf: HFConfig, max_seq_len: int) -> tuple[int, ...]:
    """Windows of Qwen2's and Qwen3's layers; ``sliding_window`` counts only if it is switched on."""
    num_layers, first = hf.integer("num_hidden_layers"), hf.get("max_window_layers", 28)
    window = hf.nullable("sliding_window", absent=4096)
    if not hf.flag("use_sliding_window", False):
        window = None
    slides = [window is not None and layer >= first for layer in range(num_layers)]
    return hf.windows(window, slides=slides, max_seq_len=max_seq_len)
