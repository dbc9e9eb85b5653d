"""The real SmolLM2 and Gemma 3 files, read through the Hugging Face view."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from pelton.ir.blocks import dequantize
from pelton.ir.evaluate import evaluate, infer_shape
from pelton.ir.recipe import AddScalar, Source, add_scalar
from pelton.models.checkpoint import assert_finite, check_tensors, open_checkpoint
from pelton.models.checkpoint.base import Checkpoint


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> Checkpoint:
    return open_checkpoint(smollm2_gguf)


@pytest.fixture(scope="module")
def gemma3(gemma3_gguf: Path) -> Checkpoint:
    return open_checkpoint(gemma3_gguf)


def test_smollm2_config(smollm2: Checkpoint) -> None:
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-05,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
    }
    assert {key: smollm2.config[key] for key in expected} == expected
    assert "rope_scaling" not in smollm2.config
    assert smollm2.generation_config["eos_token_id"][0] == 2


def transformers_state(config_class: str, checkpoint: Checkpoint):
    """Names and shapes of the model transformers builds from our config, without memory."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        config = getattr(transformers, config_class)(**checkpoint.config)
        model = transformers.AutoModelForCausalLM.from_config(config)
    state = {name: tuple(p.shape) for name, p in model.state_dict().items()}
    if checkpoint.config["tie_word_embeddings"]:
        state.pop("lm_head.weight")
    return state


def test_smollm2_has_exactly_the_tensors_of_transformers_model(smollm2: Checkpoint) -> None:
    assert check_tensors(transformers_state("LlamaConfig", smollm2), smollm2) == []


def test_gemma3_has_exactly_the_tensors_of_transformers_model(gemma3: Checkpoint) -> None:
    assert check_tensors(transformers_state("Gemma3TextConfig", gemma3), gemma3) == []


def assert_equals_transformers(checkpoint: Checkpoint) -> None:
    """Every tensor, read through its recipe, equals what transformers' own GGUF loader gives."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.set_num_threads(1)
    with torch.device("meta"):
        config = transformers.AutoConfig.from_pretrained(
            checkpoint.path.parent, gguf_file=checkpoint.path.name
        )
        model = transformers.AutoModelForCausalLM.from_config(config)
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    state = load_gguf_checkpoint(checkpoint.path, return_tensors=True, model_to_load=model)["tensors"]
    for name in checkpoint.tensors:
        tensor = checkpoint.read(name)
        assert_finite(tensor, name)
        recipe = checkpoint.source(name)
        if isinstance(recipe, AddScalar):
            values = evaluate(recipe, checkpoint.read).data
        else:
            values = dequantize(evaluate(recipe, checkpoint.read))
        assert values.shape == infer_shape(recipe, checkpoint.tensors)
        np.testing.assert_array_equal(values, state[name].numpy(), err_msg=name)


@pytest.mark.slow
def test_smollm2_weights_equal_transformers(smollm2: Checkpoint) -> None:
    assert_equals_transformers(smollm2)


@pytest.mark.slow
def test_gemma3_weights_equal_transformers(gemma3: Checkpoint) -> None:
    assert_equals_transformers(gemma3)


def test_smollm2_keeps_its_blocks(smollm2: Checkpoint) -> None:
    quants = {info.quant for info in smollm2.tensors.values()}
    assert quants == {"q4_1", "q8_0", "float32"}
    head = smollm2.read("model.embed_tokens.weight")
    assert (head.quant, head.shape, head.data.shape) == ("q8_0", (49152, 576), (49152, 612))
    assert not head.data.flags.owndata, "the mapped file, not a copy"


def test_gemma3_config(gemma3: Checkpoint) -> None:
    expected = {
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_size": 640,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "sliding_window": 512,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-06,
        "tie_word_embeddings": True,
    }
    assert {key: gemma3.config[key] for key in expected} == expected
    full = [i for i, kind in enumerate(gemma3.config["layer_types"]) if kind == "full_attention"]
    assert full == [5, 11, 17]
    assert gemma3.generation_config["eos_token_id"] == [1, 106]


def test_gemma_norms_cancel_the_models_own_plus_one(gemma3: Checkpoint) -> None:
    name = "model.layers.0.self_attn.q_norm.weight"
    assert gemma3.source(name) == AddScalar(Source(name), -1.0)
    assert add_scalar(gemma3.source(name), 1.0) == Source(name)


def test_smollm2_tokenizer_files(smollm2: Checkpoint, tmp_path: Path) -> None:
    smollm2.write_tokenizer(tmp_path)
    special = json.loads((tmp_path / "special_tokens.json").read_text())
    assert special["bos_token"] == "<|im_start|>"
    assert special["eos_token"] == "<|im_end|>"
    assert special["add_bos"] is False
    assert "<|im_start|>" in (tmp_path / "chat_template.jinja").read_text()
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 49152
    ids = tokenizer.encode("Hello  world 123<|im_end|>").ids
    assert ids == [19556, 216, 905, 216, 33, 34, 35, 2]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "Hello  world 123"


def test_gemma3_tokenizer_adds_bos_and_has_no_template(gemma3: Checkpoint, tmp_path: Path) -> None:
    gemma3.write_tokenizer(tmp_path)
    assert not (tmp_path / "chat_template.jinja").exists()
    special = json.loads((tmp_path / "special_tokens.json").read_text())
    assert special["add_bos"] is True
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = tokenizer.encode("Hello  world\n\n<end_of_turn>").ids
    assert ids == [2, 9259, 138, 12392, 108, 106]
    assert tokenizer.decode(ids) == "Hello  world\n\n"


def test_fingerprint_is_stable_and_follows_the_file(smollm2: Checkpoint, smollm2_gguf: Path) -> None:
    assert smollm2.fingerprint() == open_checkpoint(smollm2_gguf).fingerprint()
