"""Tiny random checkpoints of families that have no file in ``pelton.models``, for the import's tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.checkpoint.makers import VOCAB_SIZE, write_tokenizer

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": VOCAB_SIZE - 3,
    "eos_token_id": VOCAB_SIZE - 1,
}
_GPT: dict[str, Any] = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]

#: model_type -> what its configuration has besides the common fields.
FAMILIES: dict[str, dict[str, Any]] = {
    "arcee": {},
    "biogpt": {},
    "bitnet": {},
    "codegen": {**_GPT, "rotary_dim": 8},
    "cohere": {"use_qk_norm": True},
    "cohere2": {"sliding_window": 16, "layer_types": _MIXED},
    "ernie4_5": {},
    "exaone4": {"sliding_window": 16, "layer_types": _MIXED},
    "glm": {"head_dim": 16},
    "glm4": {"head_dim": 16},
    "gpt_bigcode": _GPT,
    "gpt_neox": {"num_key_value_heads": 4, "rotary_pct": 0.25},
    "gptj": {**_GPT, "rotary_dim": 8},
    "granite": {"logits_scaling": 8.0, "residual_multiplier": 0.22, "embedding_multiplier": 12.0},
    "granite_swa": {"sliding_window": 16, "layer_types": _MIXED, "layer_rope_theta": [10000.0, 5e5, 10000.0]},
    "helium": {"head_dim": 16},
    "nemotron": {},
    "olmo": {"clip_qkv": 0.5},
    "olmo2": {},
    "olmo3": {"sliding_window": 16, "layer_types": _MIXED},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "persimmon": {},
    "phi": {},
    "seed_oss": {"head_dim": 32},
    "smollm3": {},
    "stablelm": {"use_qkv_bias": True},
    "starcoder2": {"sliding_window": 16},
}

#: Families with a file, forced through the import: model_type -> fields.
OWN: dict[str, dict[str, Any]] = {
    "gemma2": {"head_dim": 32, "sliding_window": 16, "query_pre_attn_scalar": 32},
    "gemma3_text": {"head_dim": 32, "sliding_window": 16, "query_pre_attn_scalar": 32, "layer_types": _MIXED},
    "gpt2": _GPT,
    "llama": {},
    "phi3": {"sliding_window": 16},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
}


def make_config(model_type: str, **fields: Any) -> Any:
    """A tiny configuration, no padding token."""
    values = {**_COMMON, **FAMILIES.get(model_type, {}), **OWN.get(model_type, {}), **fields}
    config = transformers.AutoConfig.for_model(model_type, **values)
    config.pad_token_id = None
    config._attn_implementation = "eager"
    return config


def make_model(model_type: str, **fields: Any) -> Any:
    """A random float32 model whose norms and biases are not trivially 1 and 0."""
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(make_config(model_type, **fields)).eval().float()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter += noise * (0.1 if parameter.ndim == 1 else 0.06)
    return model


def write_checkpoint(model: Any, folder: Path) -> Path:
    """``model`` as a Hugging Face folder with a tokenizer."""
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def config_dict(model: Any) -> dict[str, Any]:
    """What ``save_pretrained`` writes as config.json."""
    values: dict[str, Any] = model.config.to_dict()
    return {**values, "architectures": [type(model).__name__]}
