"""One tiny ``transformers`` model per architecture, several where an option changes the network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers as hf

from tests.models.oracle import VOCAB, make_hf

TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]


def llama(**options: Any) -> Any:
    return make_hf(hf.LlamaConfig, hf.LlamaForCausalLM, **{**TINY, **options})


def mistral(**options: Any) -> Any:
    return make_hf(hf.MistralConfig, hf.MistralForCausalLM, **{**TINY, "sliding_window": 6, **options})


def ministral(**options: Any) -> Any:
    own = {"sliding_window": 6, "layer_types": MIXED, "head_dim": 8}
    return make_hf(hf.MinistralConfig, hf.MinistralForCausalLM, **{**TINY, **own, **options})


def qwen2(**options: Any) -> Any:
    return make_hf(hf.Qwen2Config, hf.Qwen2ForCausalLM, **{**TINY, **options})


def qwen3(**options: Any) -> Any:
    return make_hf(hf.Qwen3Config, hf.Qwen3ForCausalLM, **{**TINY, "head_dim": 16, **options})


def phi3(**options: Any) -> Any:
    return make_hf(hf.Phi3Config, hf.Phi3ForCausalLM, **{**TINY, **options})


def gemma(**options: Any) -> Any:
    return make_hf(hf.GemmaConfig, hf.GemmaForCausalLM, **{**TINY, "head_dim": 16, **options})


def gemma2(**options: Any) -> Any:
    own = {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 12, "attn_logit_softcapping": 0.5}
    own["final_logit_softcapping"] = 2.0
    return make_hf(hf.Gemma2Config, hf.Gemma2ForCausalLM, **{**TINY, **own, **options})


def gemma3(**options: Any) -> Any:
    own = {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 12, "layer_types": MIXED}
    return make_hf(hf.Gemma3TextConfig, hf.Gemma3ForCausalLM, **{**TINY, **own, **options})


def gpt2(**options: Any) -> Any:
    own = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    return make_hf(hf.GPT2Config, hf.GPT2LMHeadModel, **{**own, **options})


#: Architecture -> maker of a typical tiny model.
ZOO: dict[str, Callable[..., Any]] = {
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "MinistralForCausalLM": ministral,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "Phi3ForCausalLM": phi3,
    "GemmaForCausalLM": gemma,
    "Gemma2ForCausalLM": gemma2,
    "Gemma3ForCausalLM": gemma3,
    "GPT2LMHeadModel": gpt2,
}
