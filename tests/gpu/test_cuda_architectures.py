"""Engines of other architectures on a GPU: windows, soft caps, biases, norms of heads, learned positions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pelton.builder.build import build
from pelton.engine.config import BuildConfig
from tests.builder.random_checkpoint import RandomCheckpoint

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

COMMON: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
MIXED = ["sliding_attention", "full_attention"]
GPT2 = {"vocab_size": 200, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
CONFIGS: dict[str, dict[str, Any]] = {
    "MistralForCausalLM": COMMON | {"sliding_window": 12},
    "Qwen2ForCausalLM": COMMON,
    "Qwen3ForCausalLM": COMMON,
    "Gemma2ForCausalLM": COMMON
    | {
        "sliding_window": 12,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": MIXED,
    },
    "Gemma3ForCausalLM": COMMON
    | {
        "sliding_window": 12,
        "query_pre_attn_scalar": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_local_base_freq": 10000.0,
        "layer_types": MIXED,
    },
    "GPT2LMHeadModel": GPT2 | {"layer_norm_epsilon": 1e-5, "eos_token_id": 2, "bos_token_id": 1},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", CONFIGS)
def test_an_engine_computes_what_its_model_does(architecture: str, dtype: str, tmp_path: Path) -> None:
    """The build compares the engine's logits on the GPU with the eager model's, over several steps."""
    config = CONFIGS[architecture] | {"architectures": [architecture]}
    settings = BuildConfig(target="cuda", max_batch_size=4, max_num_tokens=128, kv_dtype=dtype)
    report = build(RandomCheckpoint(config, quant=dtype), settings, output=tmp_path / "x.engine")
    assert report.quality is not None
    assert report.quality.runner == "cuda"
    if dtype == "float32":
        assert report.quality.max_error < 1e-4
    else:
        assert report.quality.kl_mean < 1e-2
