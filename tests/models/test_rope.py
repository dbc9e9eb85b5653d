"""RoPE scalings: logits and tables equal ``transformers``, in every spelling of the configuration."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pelton.errors import CheckpointError
from pelton.models.hf_config import HFConfig
from pelton.models.registry import create_model
from pelton.nn import rope_frequencies
from tests.models import zoo
from tests.models.oracle import check_against_hf, error_against_hf, hf_config_dict

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.9],
    "long_factor": [1.2, 2.5, 3.0, 7.0],
}


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 3.0},
        LLAMA3,
        YARN,
        {**YARN, "beta_fast": 16, "beta_slow": 2, "truncate": False},
        {**YARN, "attention_factor": 1.3},
        {**YARN, "mscale": 0.8, "mscale_all_dim": 0.5},
    ],
    ids=str,
)
def test_logits_with_scaling_equal_transformers(scaling: dict[str, Any]) -> None:
    hf = zoo.llama(rope_parameters={"rope_theta": 500.0, **scaling})
    check_against_hf(hf)
    unscaled = {"rope_type": "default", "rope_theta": 500.0}
    assert error_against_hf(hf, rope_parameters=unscaled) > 3e-4


def test_dynamic_scaling_is_that_of_the_longest_sequence() -> None:
    options: dict[str, Any] = {
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 500.0},
        "max_position_embeddings": 16,
    }
    # A fresh model each time: Hugging Face's keeps the table of the longest text it has seen.
    check_against_hf(zoo.llama(**options), max_seq_len=16, lengths=(16, 5))
    check_against_hf(zoo.llama(**options), max_seq_len=26, lengths=(26,))
    assert error_against_hf(zoo.llama(**options), max_seq_len=16, lengths=(26,)) > 3e-4


def test_longrope_takes_the_long_factors_when_sequences_may_be_long() -> None:
    options: dict[str, Any] = {"original_max_position_embeddings": 16, "max_position_embeddings": 64}
    hf = zoo.phi3(rope_parameters={"rope_theta": 500.0, **LONG}, **options)
    check_against_hf(hf, max_seq_len=64, lengths=(26, 17, 20))
    check_against_hf(hf, max_seq_len=16, lengths=(16, 5))


@pytest.mark.parametrize("kind", ["linear", "dynamic", "llama3", "yarn", "longrope"])
def test_tables_equal_transformers_at_a_real_size(kind: str) -> None:
    keys = {
        "linear": {"factor": 2.5},
        "dynamic": {"factor": 4.0},
        "llama3": {**LLAMA3, "original_max_position_embeddings": 8192},
        "yarn": {"factor": 16.0, "original_max_position_embeddings": 8192},
        "longrope": {
            "short_factor": [1.0 + i / 40 for i in range(64)],
            "long_factor": [1.0 + i for i in range(64)],
            "original_max_position_embeddings": 8192,
        },
    }[kind]
    parameters = {**keys, "rope_type": kind, "rope_theta": 500000.0}
    config = LlamaConfig(
        hidden_size=4096,
        num_attention_heads=32,
        max_position_embeddings=131072,
        rope_parameters=dict(parameters),
    )
    want, want_scale = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=200000)
    got, scale = rope_frequencies(
        parameters, head_dim=128, max_position_embeddings=131072, max_seq_len=200000
    )
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    assert scale == pytest.approx(want_scale)


@pytest.mark.parametrize(
    "old",
    [
        {"rope_scaling": {"type": "linear", "factor": 3.0}, "rope_theta": 500.0},
        {"rope_scaling": {"rope_type": "linear", "factor": 3.0, "type": "linear"}, "rope_theta": 500.0},
        {"rope_scaling": {"rope_type": "linear", "factor": 3}, "rope_theta": 500},
    ],
    ids=str,
)
def test_older_spellings_of_the_configuration_mean_the_same(old: dict[str, Any]) -> None:
    hf = zoo.llama(rope_parameters={"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0})
    assert error_against_hf(hf, rope_parameters=None, **old) < 1e-4


def test_gemma3_older_spelling_has_two_base_frequencies() -> None:
    hf = zoo.gemma3(
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
        }
    )
    check_against_hf(hf)
    old = {
        "rope_parameters": None,
        "rope_theta": 500.0,
        "rope_local_base_freq": 70.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "layer_types": None,
        "sliding_window_pattern": 2,
    }
    new = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    assert error_against_hf(hf, **new) < 1e-4
    assert error_against_hf(hf, **old) < 1e-4


def test_phi3_su_is_longrope() -> None:
    config = {"rope_scaling": {"type": "su", "long_factor": [1], "short_factor": [1]}}
    assert HFConfig(config, "Phi3ForCausalLM").rope()["rope_type"] == "longrope"


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "spiral", "factor": 2.0}, "rope_type 'spiral' is not implemented.*yarn"),
        ({"rope_type": "linear"}, "'linear' needs 'factor'"),
        ({"rope_type": "llama3", "factor": 8.0}, "'llama3' needs 'low_freq_factor'"),
        ({"factor": 8.0}, "'default' has factor: give rope_type"),
        ({**LONG, "long_factor": [1.0]}, "long_factor has 1 values; the rotary dimension 8 needs 4"),
    ],
)
def test_bad_scalings_are_named(scaling: dict[str, Any], message: str) -> None:
    config = hf_config_dict(zoo.llama(), rope_parameters=None, rope_scaling=scaling, rope_theta=1e4)
    config["original_max_position_embeddings"] = 16
    with pytest.raises(CheckpointError, match=message):
        create_model(config, max_seq_len=64)
