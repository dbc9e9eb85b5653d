"""Every architecture, with each option it implements, against ``transformers``.

Logits of every token, three packed texts, prefill and decode mixed, past the sliding windows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pelton import nn
from pelton.models.registry import ARCHITECTURES, create_model
from tests.models import zoo
from tests.models.oracle import (
    check_against_hf,
    error_against_hf,
    hf_logits,
    load_ours,
    read_from,
    relative_error,
    texts,
)
from tests.models.paged import PagedRunner, run_packed

CASES: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (zoo.llama, {}),
    (zoo.llama, {"num_key_value_heads": 1}),
    (zoo.llama, {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    (zoo.llama, {"head_dim": 16}),
    (zoo.llama, {"attention_bias": True, "mlp_bias": True}),
    (zoo.llama, {"hidden_act": "gelu"}),
    (zoo.mistral, {}),
    (zoo.mistral, {"sliding_window": None, "head_dim": 12}),
    (zoo.ministral, {}),
    (zoo.qwen2, {"tie_word_embeddings": True}),
    (zoo.qwen2, {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    (zoo.qwen2, {"use_sliding_window": True, "sliding_window": 5, "layer_types": zoo.MIXED}),
    (zoo.qwen3, {}),
    (
        zoo.qwen3,
        {"attention_bias": True, "use_sliding_window": True, "max_window_layers": 2, "sliding_window": 6},
    ),
    (zoo.phi3, {}),
    (zoo.phi3, {"sliding_window": 6, "tie_word_embeddings": True}),
    (zoo.phi3, {"num_attention_heads": 2, "num_key_value_heads": 1, "partial_rotary_factor": 0.75}),
    (zoo.gemma, {}),
    (zoo.gemma, {"num_key_value_heads": 1, "tie_word_embeddings": False, "attention_bias": True}),
    (zoo.gemma, {"hidden_act": "gelu"}),
    (zoo.gemma2, {}),
    (zoo.gemma2, {"attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True}),
    (zoo.gemma3, {}),
    (zoo.gemma3, {"tie_word_embeddings": False, "final_logit_softcapping": 3.0}),
    (zoo.gpt2, {}),
    (zoo.gpt2, {"n_inner": 40, "activation_function": "relu", "tie_word_embeddings": False}),
    (zoo.gpt2, {"scale_attn_by_inverse_layer_idx": True}),
    (zoo.gpt2, {"scale_attn_weights": False}),
]


@pytest.mark.parametrize(("make", "options"), CASES, ids=lambda v: getattr(v, "__name__", None) or str(v))
def test_logits_equal_transformers(make: Callable[..., Any], options: dict[str, Any]) -> None:
    check_against_hf(make(**options))


def test_every_registered_architecture_has_a_tiny_model() -> None:
    shipped = {name for name in ARCHITECTURES if isinstance(ARCHITECTURES[name], str)}
    assert shipped - set(zoo.ZOO) == {"Gemma3ForConditionalGeneration"}


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (zoo.llama, {"rms_norm_eps": 1e-2}),
        (zoo.llama, {"rope_parameters": {"rope_type": "default", "rope_theta": 9000.0}}),
        (zoo.mistral, {"sliding_window": 7}),
        (zoo.ministral, {"layer_types": zoo.MIXED[::-1][1:] + ["sliding_attention"]}),
        (zoo.gemma2, {"attn_logit_softcapping": None}),
        (zoo.gemma2, {"final_logit_softcapping": None}),
        (zoo.gemma2, {"query_pre_attn_scalar": 16}),
        (zoo.gemma3, {"sliding_window": 7}),
        (zoo.gemma3, {"layer_types": ["full_attention"] * 3}),
        (zoo.phi3, {"hidden_act": "gelu"}),
        (zoo.gpt2, {"activation_function": "gelu"}),
        (zoo.gpt2, {"scale_attn_by_inverse_layer_idx": True}),
    ],
    ids=lambda v: getattr(v, "__name__", None) or str(v),
)
def test_a_wrong_option_shows(make: Callable[..., Any], change: dict[str, Any]) -> None:
    """The comparison above would notice each of these options being ignored."""
    assert error_against_hf(make(), **change) > 1e-4


def test_windows_group_layers_and_count_only_where_a_sequence_can_outgrow_them() -> None:
    hf = zoo.gemma3()
    groups = load_ours(hf).kv_groups()
    assert [(g.layers, g.window) for g in groups] == [((0, 2), 6), ((1,), 0)]
    assert [g.layers for g in load_ours(hf, max_seq_len=6).kv_groups()] == [(0, 1, 2)]


def test_gemma3_with_a_vision_tower_serves_its_language_model() -> None:
    text = zoo.gemma3()
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": text.config.to_dict(),
        "vision_config": vision,
        "mm_tokens_per_image": 4,
    }
    model = create_model(config, max_seq_len=64)
    assert model.ignored_options == ()
    state = {f"language_model.{name}": value for name, value in text.state_dict().items()}
    nn.load_weights(model, read_from(state))
    tokens = texts((20,))[0]
    (got,) = run_packed(PagedRunner(model), [tokens])
    assert relative_error(got, hf_logits(text, tokens)) < 1e-4
    assert model.tied() == {"language_model.lm_head.weight": "language_model.model.embed_tokens.weight"}
