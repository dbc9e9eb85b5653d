"""What cannot be imported is refused with one sentence that says why."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import transformers

from pelton.errors import CheckpointError, ConfigError
from pelton.models.registry import create_model
from tests.models_import.families import config_dict, make_config, make_model

_NEO = {"num_layers": 3, "num_heads": 4, "attention_types": [[["global", "local", "global"], 1]]}
_MPT = {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 128, "expansion_ratio": 2}


def config_of(model_type: str, architecture: str, **fields: Any) -> dict[str, Any]:
    return {**make_config(model_type, **fields).to_dict(), "architectures": [architecture]}


@pytest.mark.parametrize(
    ("model_type", "architecture", "fields", "message"),
    [
        ("falcon", "FalconForCausalLM", {}, "computes attention by itself"),
        ("mpt", "MptForCausalLM", _MPT, "ALiBi"),
        ("bloom", "BloomForCausalLM", {"n_layer": 2, "n_head": 4}, "takes no position_ids"),
        ("gpt_neo", "GPTNeoForCausalLM", _NEO, "computes attention by itself"),
        ("xglm", "XGLMForCausalLM", {}, "uses its attention mask by itself"),
        ("mamba", "MambaForCausalLM", {}, "keeps a recurrent state"),
        ("qwen2_moe", "Qwen2MoeForCausalLM", {}, "mixture of experts"),
        ("mixtral", "MixtralForCausalLM", {}, "mixture of experts"),
        ("gpt_oss", "GptOssForCausalLM", {}, "mixture of experts"),
        ("t5", "T5ForConditionalGeneration", {}, "encoder-decoder"),
        ("bert", "BertModel", {}, "architecture BertModel, but"),
        ("diffllama", "DiffLlamaForCausalLM", {}, "calls attention 6 times for its 3 layers"),
        ("apertus", "ApertusForCausalLM", {}, r"aten\.softplus.* in model\.layers\.0\.mlp"),
        ("stablelm", "StableLmForCausalLM", {"qk_layernorm": True}, r"aten\.cat.* in model\.layers\.0"),
    ],
)
def test_what_an_engine_cannot_run(
    model_type: str, architecture: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        create_model(config_of(model_type, architecture, **fields), max_seq_len=96)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
    assert architecture in str(caught.value)


def test_an_architecture_nobody_knows() -> None:
    config = {"architectures": ["NovelForCausalLM"], "model_type": "novel", "auto_map": {"AutoModel": "x.Y"}}
    with pytest.raises(CheckpointError, match=r"neither in Pelton nor in transformers.*never run"):
        create_model(config, max_seq_len=96)


def test_pelton_alone_is_asked_for() -> None:
    with pytest.raises(
        CheckpointError, match=r"Olmo2ForCausalLM is not implemented.*model_impl transformers"
    ):
        create_model(config_of("olmo2", "Olmo2ForCausalLM"), max_seq_len=96, impl="pelton")


def test_transformers_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(CheckpointError, match=r"not installed: pip install 'pelton\[import\]'"):
        create_model({"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}, max_seq_len=96)


def test_quantised_checkpoints_of_others() -> None:
    config = config_of("olmo2", "Olmo2ForCausalLM")
    with pytest.raises(CheckpointError, match="quantization_config is not implemented"):
        create_model({**config, "quantization_config": {"quant_method": "gptq", "bits": 4}}, max_seq_len=96)


def test_an_option_that_the_model_does_not_have_is_reported() -> None:
    config = {**config_of("olmo2", "Olmo2ForCausalLM"), "novelty_factor": 3}
    assert create_model(config, max_seq_len=96).ignored_options == ("novelty_factor",)


def test_learned_positions_bound_the_length() -> None:
    config = config_of("opt", "OPTForCausalLM", ffn_dim=96, word_embed_proj_dim=64)
    with pytest.raises(ConfigError, match="max_seq_len 129 exceeds the 128 positions"):
        create_model(config, max_seq_len=129)


@pytest.mark.parametrize(
    ("argument", "message"),
    [("alibi_slopes", "gives attention 'alibi_slopes'"), ("s_aux", r"sinks of shape \[64\], not one a head")],
)
def test_what_attention_is_given_and_does_not_have_is_refused(argument: str, message: str) -> None:
    """Not dropped."""
    model = make_model("olmo2")
    config = config_dict(model)
    original = transformers.models.olmo2.modeling_olmo2.Olmo2Attention.forward

    def with_more(self: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs, **{argument: self.q_norm.weight})

    transformers.models.olmo2.modeling_olmo2.Olmo2Attention.forward = with_more
    try:
        with pytest.raises(CheckpointError, match=message):
            create_model(config, max_seq_len=96)
    finally:
        transformers.models.olmo2.modeling_olmo2.Olmo2Attention.forward = original
