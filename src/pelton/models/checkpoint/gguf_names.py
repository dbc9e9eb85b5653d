"""Tensor names: GGUF's to Hugging Face's, per architecture, and how stored values differ."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class NameMap:
    """One GGUF architecture's tensors. ``layer`` names follow ``layer_prefix.N.``."""

    outside: Mapping[str, str]
    layer: Mapping[str, str]
    layer_prefix: str = "model.layers"
    permuted: tuple[str, ...] = ()
    """GGUF layer names whose rows llama.cpp permuted for interleaved RoPE."""
    plus_one: bool = False
    """Norm weights are stored plus one (the Gemma family)."""
    transposed: tuple[str, ...] = ()
    """GGUF layer names that Hugging Face keeps transposed (GPT-2's Conv1D)."""
    metadata: tuple[str, ...] = field(default=("rope_freqs", "rope_factors_long", "rope_factors_short"))
    """Tensors that belong to the config, not to the model."""

    def to_hf(self, name: str) -> str | None:
        """Hugging Face name of GGUF tensor ``name`` (``blk.3.attn_q.weight``); None: not a weight.

        Raises ``KeyError`` when this architecture has no such tensor.
        """
        stem, _, suffix = name.rpartition(".")
        if stem in self.metadata:
            return None
        match = re.fullmatch(r"blk\.(\d+)\.(.+)", stem)
        if match is None:
            return f"{self.outside[stem]}.{suffix}"
        index, part = match.groups()
        if part in self.metadata:
            return None
        return f"{self.layer_prefix}.{index}.{self.layer[part]}.{suffix}"

    def part(self, name: str) -> str:
        """The layer part of a GGUF name: ``attn_q`` of ``blk.3.attn_q.weight``; the stem otherwise."""
        return re.sub(r"^blk\.\d+\.", "", name).rpartition(".")[0]


_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_SANDWICH_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_COMMON = _ATTENTION | _MLP | _NORMS

NAME_MAPS = {
    "llama": NameMap(outside=_OUTSIDE, layer=_COMMON, permuted=("attn_q", "attn_k")),
    "qwen2": NameMap(outside=_OUTSIDE, layer=_COMMON),
    "qwen3": NameMap(outside=_OUTSIDE, layer=_COMMON | _QK_NORMS),
    "gemma": NameMap(outside=_OUTSIDE, layer=_COMMON, plus_one=True),
    "gemma2": NameMap(outside=_OUTSIDE, layer=_ATTENTION | _MLP | _SANDWICH_NORMS, plus_one=True),
    "gemma3": NameMap(outside=_OUTSIDE, layer=_ATTENTION | _MLP | _SANDWICH_NORMS | _QK_NORMS, plus_one=True),
    "phi3": NameMap(
        outside=_OUTSIDE,
        layer=_NORMS
        | {
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
    ),
    "gpt2": NameMap(
        outside={
            "token_embd": "transformer.wte",
            "position_embd": "transformer.wpe",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
        layer={
            "attn_norm": "ln_1",
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_norm": "ln_2",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
        layer_prefix="transformer.h",
        transposed=("attn_qkv", "attn_output", "ffn_up", "ffn_down"),
    ),
}
