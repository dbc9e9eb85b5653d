"""Configurations that Pelton cannot run are refused with a sentence that names what and where."""

from __future__ import annotations

from typing import Any

import pytest

from pelton.errors import CheckpointError, ConfigError
from pelton.models.registry import create_model
from tests.models import zoo
from tests.models.oracle import hf_config_dict, load_ours


@pytest.fixture(scope="module")
def llama() -> dict[str, Any]:
    return hf_config_dict(zoo.llama())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            "names the architecture MambaForCausalLM.*is LlamaForCausalLM",
        ),
        ({"architectures": None}, "no 'architectures'"),
        ({"hidden_act": "tanh"}, "hidden_act='tanh' is not implemented.*silu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config=.*gptq.*not implemented"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not implemented"),
        ({"num_local_experts": 8}, "num_local_experts=8 is not implemented"),
        ({"vocab_size": None}, "has no 'vocab_size'"),
        ({"vocab_size": "many"}, "vocab_size must be a positive integer, not 'many'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, not 0"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number, not 'small'"),
        ({"attention_bias": "q"}, "attention_bias must be true or false, not 'q'"),
        ({"num_key_value_heads": 3}, "4 is no multiple of num_key_value_heads 3"),
    ],
    ids=lambda v: str(v)[:40],
)
def test_refused(llama: dict[str, Any], change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        create_model({**llama, **change}, max_seq_len=64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["chunked_attention"] * 3}, "layer_types contains chunked_attention"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 3 layers"),
        ({"layer_types": zoo.MIXED, "sliding_window": None}, "sliding_window must be a positive integer"),
    ],
)
def test_layer_types_must_fit(change: dict[str, Any], message: str) -> None:
    config = {**hf_config_dict(zoo.mistral()), **change}
    with pytest.raises(CheckpointError, match=message):
        create_model(config, max_seq_len=64)


def test_gemma3_score_softcap_is_refused() -> None:
    config = hf_config_dict(zoo.gemma3(), attn_logit_softcapping=50.0)
    with pytest.raises(CheckpointError, match=r"attn_logit_softcapping=50\.0 is not implemented"):
        create_model(config, max_seq_len=64)


def test_gpt2_cannot_go_beyond_its_positions() -> None:
    with pytest.raises(ConfigError, match="max_seq_len 65 exceeds the 64 positions"):
        create_model(hf_config_dict(zoo.gpt2()), max_seq_len=65)


def test_unknown_keys_are_kept_for_the_report(llama: dict[str, Any]) -> None:
    model = create_model({**llama, "novelty_factor": 3, "use_cache": False}, max_seq_len=64)
    assert model.ignored_options == ("novelty_factor",)


def test_a_wrong_shape_is_named() -> None:
    hf = zoo.llama()
    with pytest.raises(
        CheckpointError,
        match=r"mlp\.gate_proj\.weight the shape \(48, 32\); the model's .* asks for \(40, 32\)",
    ):
        load_ours(hf, intermediate_size=40)
