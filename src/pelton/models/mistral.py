"""Mistral (Jiang et al., 2023) and Ministral: Llama with sliding-window attention."""

from __future__ import annotations

from pelton.models.hf_config import HFConfig
from pelton.models.llama import LlamaConfig, LlamaForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    """Every layer slides unless ``sliding_window`` is null or ``layer_types`` says otherwise."""

    @classmethod
    def from_config(cls, hf: HFConfig, max_seq_len: int) -> MistralForCausalLM:
        window = hf.nullable("sliding_window", absent=4096)
        slides = [window is not None] * hf.integer("num_hidden_layers")
        windows = hf.windows(window, slides=slides, max_seq_len=max_seq_len)
        hf.expect("attention_bias", None, False)
        return cls(LlamaConfig.read(hf, max_seq_len, windows=windows))
