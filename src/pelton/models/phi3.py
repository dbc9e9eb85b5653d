"""Phi-3 and Phi-4-mini (Abdin et al., 2024): Llama with packed projections and LongRoPE.

The checkpoint stacks q, k, v in ``qkv_proj`` and gate, up in ``gate_up_proj``. Positions may rotate
only part of a head (``partial_rotary_factor``).
"""

from __future__ import annotations

from pelton.models.hf_config import HFConfig
from pelton.models.llama import LlamaConfig, LlamaForCausalLM


class Phi3ForCausalLM(LlamaForCausalLM):
    """Every layer slides unless ``sliding_window`` is null."""

    @classmethod
    def from_config(cls, hf: HFConfig, max_seq_len: int) -> Phi3ForCausalLM:
        hf.expect("attention_bias", None, False)
        window = hf.nullable("sliding_window")
        slides = [window is not None] * hf.integer("num_hidden_layers")
        windows = hf.windows(window, slides=slides, max_seq_len=max_seq_len)
        rope = hf.rope()
        if rope["rope_type"] == "yarn":
            # Early Phi-3 files call LongRoPE so (and "su", which ``rope`` knows).
            rope["rope_type"] = "longrope"
        if rope["rope_type"] == "longrope":
            rope.setdefault("original_max_position_embeddings", 4096)
        config = LlamaConfig.read(
            hf, max_seq_len, norm_eps=hf.number("rms_norm_eps", 1e-5), windows=windows, rope=rope, packed=True
        )
        return cls(config)
