"""GGUF files of every architecture, written as llama.cpp's converter does, read back as Hugging Face."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import GGUFReader

from pelton.errors import CheckpointError
from pelton.ir.blocks import dequantize
from pelton.ir.evaluate import evaluate
from pelton.ir.recipe import Source, transpose
from pelton.models.checkpoint import check_tensors, open_checkpoint
from pelton.models.checkpoint.gguf_config import llama3_divisors
from pelton.models.checkpoint.gguf_file import GGUFFile
from tests.checkpoint.makers import ARCHITECTURES, tiny_gguf, tiny_model

torch.set_num_threads(1)


def expected_state(model: Any) -> dict[str, np.ndarray]:
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    return state


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_tensor_reads_back_as_hugging_faces(arch: str, tmp_path: Path) -> None:
    model = tiny_model(arch)
    checkpoint = open_checkpoint(tiny_gguf(arch, tmp_path, model=model))
    state = expected_state(model)
    assert check_tensors({name: values.shape for name, values in state.items()}, checkpoint) == []
    for name, values in state.items():
        read = evaluate(checkpoint.source(name), checkpoint.read)
        rounding = 2e-7 if "norm" in name and arch.startswith("gemma") else 0  # w + 1 - 1
        np.testing.assert_allclose(dequantize(read), values, rtol=0, atol=rounding, err_msg=name)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_config_gives_transformers_the_same_model(arch: str, tmp_path: Path) -> None:
    """A model built from our config dict and our tensors has the original's logits."""
    model = tiny_model(arch)
    checkpoint = open_checkpoint(tiny_gguf(arch, tmp_path, model=model))
    class_name = "LlamaConfig" if arch == "mistral" else ARCHITECTURES[arch][0]
    config = getattr(transformers, class_name)(**{"pad_token_id": None, **checkpoint.config})
    copy = transformers.AutoModelForCausalLM.from_config(config).eval()
    state = {}
    for name in checkpoint.tensors:
        state[name] = torch.from_numpy(dequantize(evaluate(checkpoint.source(name), checkpoint.read)))
    missing, unexpected = copy.load_state_dict(state, strict=False)
    assert unexpected == []
    assert set(missing) <= {"lm_head.weight"}
    copy.tie_weights()
    window = 16 if arch == "mistral" else 40  # a GGUF file of a Mistral does not carry its window
    ids = torch.arange(window)[None] % model.config.vocab_size
    with torch.no_grad():
        torch.testing.assert_close(copy(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("quant", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16", "F16"])
def test_quantised_tensors_stay_blocks_with_rows_in_hugging_faces_order(quant: str, tmp_path: Path) -> None:
    model = tiny_model("llama")
    path = tiny_gguf("llama", tmp_path, model=model, quant=quant)
    checkpoint = open_checkpoint(path)
    expected = {"BF16": "bfloat16", "F16": "float16"}.get(quant, quant.lower())
    raw = {t.name: t.data for t in GGUFReader(path).tensors}
    for part, stored, heads in (("q_proj", "attn_q", 4), ("k_proj", "attn_k", 2), ("v_proj", "attn_v", 0)):
        name = f"model.layers.1.self_attn.{part}.weight"
        tensor = checkpoint.read(name)
        assert tensor.quant == checkpoint.tensors[name].quant == expected
        rows = np.sort(tensor.data.view(np.uint8).reshape(tensor.shape[0], -1), axis=0)
        original = raw[f"blk.1.{stored}.weight"].view(np.uint8).reshape(tensor.shape[0], -1)
        np.testing.assert_array_equal(rows, np.sort(original, axis=0))  # the same rows, bit for bit
        weight = model.state_dict()[name].numpy()
        relative = np.linalg.norm(dequantize(tensor) - weight) / np.linalg.norm(weight)
        assert relative < 0.12, f"{name} with {heads} heads is in another order"


def test_llama_biases_of_q_and_k_are_permuted_too(tmp_path: Path) -> None:
    model = tiny_model("llama", attention_bias=True)
    checkpoint = open_checkpoint(tiny_gguf("llama", tmp_path, model=model))
    assert checkpoint.config["attention_bias"] is True
    for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
        name = f"model.layers.0.self_attn.{part}.bias"
        np.testing.assert_array_equal(checkpoint.read(name).data, model.state_dict()[name].numpy())


def test_a_gpt2_matrix_folds_back_to_its_stored_blocks(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_gguf("gpt2", tmp_path, quant="Q8_0"))
    name = "transformer.h.0.attn.c_attn.weight"
    recipe = transpose(checkpoint.source(name))
    assert recipe == Source(name)
    assert evaluate(recipe, checkpoint.read).quant == "q8_0"


def test_a_type_without_blocks_of_ours_is_read_as_float32_and_noted(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(
        tiny_gguf("llama", tmp_path, quant="TQ2_0", hidden_size=256, intermediate_size=256)
    )
    info = checkpoint.tensors["model.layers.0.mlp.up_proj.weight"]
    assert info.quant == "tq2_0"
    assert info.note == "tq2_0 has no Pelton block type: read as float32"
    tensor = checkpoint.read(info.name)
    assert (tensor.quant, tensor.data.dtype, tensor.data.shape) == ("float32", np.float32, (256, 256))
    assert len(np.unique(tensor.data[0])) <= 3


# --- metadata ----------------------------------------------------------------------------------------


def config_with(tmp_path: Path, metadata: dict[str, Any], arch: str = "llama", **more: Any) -> dict[str, Any]:
    return open_checkpoint(tiny_gguf(arch, tmp_path, metadata=metadata, **more)).config


def test_linear_rope_scaling(tmp_path: Path) -> None:
    metadata = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert config_with(tmp_path, metadata)["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    old = {"llama.rope.scale_linear": 2.0}
    assert config_with(tmp_path / "old", old)["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}


def test_yarn_rope_scaling(tmp_path: Path) -> None:
    metadata = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 64,
        "llama.rope.scaling.yarn_beta_fast": 16.0,
    }
    assert config_with(tmp_path, metadata)["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16.0,
    }


def test_llama3_scaling_is_recovered_from_its_frequency_factors(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    shape = {"head_dim": 16, "rope_theta": 10000.0}
    factors = llama3_divisors(shape, scaling).astype(np.float32)
    transformers_config = transformers.LlamaConfig(
        head_dim=16, rope_parameters={**scaling, "rope_theta": 10000.0}, max_position_embeddings=131072
    )
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    plain = 10000.0 ** (-np.arange(0, 16, 2) / 16)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](transformers_config, "cpu")
    np.testing.assert_allclose(plain / factors, scaled.numpy(), rtol=1e-5)
    config = config_with(tmp_path, {}, tensors={"rope_freqs.weight": factors})
    assert config["rope_scaling"] == scaling


def test_unknown_frequency_factors_are_kept_as_they_are(tmp_path: Path) -> None:
    factors = np.linspace(1, 3, 8, dtype=np.float32)
    scaling = config_with(tmp_path, {}, tensors={"rope_freqs.weight": factors})["rope_scaling"]
    assert scaling["rope_type"] == "longrope"
    assert scaling["attention_factor"] == 1.0
    assert scaling["long_factor"] == scaling["short_factor"] == factors.tolist()


def test_phi3_longrope_factors(tmp_path: Path) -> None:
    long, short = np.linspace(1, 8, 8, dtype=np.float32), np.ones(8, np.float32)
    config = config_with(
        tmp_path,
        {"phi3.rope.scaling.original_context_length": 64, "phi3.rope.scaling.attn_factor": 1.25},
        arch="phi3",
        tensors={"rope_factors_long.weight": long, "rope_factors_short.weight": short},
    )
    assert config["original_max_position_embeddings"] == 64
    assert config["rope_scaling"] == {
        "rope_type": "longrope",
        "long_factor": long.tolist(),
        "short_factor": short.tolist(),
        "original_max_position_embeddings": 64,
        "attention_factor": 1.25,
    }


def test_gemma_windows_and_caps(tmp_path: Path) -> None:
    gemma2 = config_with(tmp_path, {}, arch="gemma2")
    assert gemma2["layer_types"] == ["sliding_attention", "full_attention", "sliding_attention"]
    assert (gemma2["attn_logit_softcapping"], gemma2["final_logit_softcapping"]) == (50.0, 30.0)
    gemma3 = config_with(
        tmp_path, {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}, "gemma3"
    )
    assert gemma3["layer_types"].count("full_attention") == 1
    assert gemma3["layer_types"][5] == "full_attention"
    assert gemma3["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    assert gemma3["rope_local_base_freq"] == 10000.0


def test_a_window_list_in_the_file_overrides_the_usual_pattern(tmp_path: Path) -> None:
    flags = [True, True, False]
    config = config_with(tmp_path, {"gemma2.attention.sliding_window_pattern": flags}, arch="gemma2")
    assert config["layer_types"] == ["sliding_attention", "sliding_attention", "full_attention"]


def test_our_parser_agrees_with_the_gguf_library(tmp_path: Path) -> None:
    path = tiny_gguf("llama", tmp_path, quant="Q4_1")
    ours, theirs = GGUFFile(path), GGUFReader(path)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            value = field.contents()
            assert ours.metadata[key] == (pytest.approx(value) if isinstance(value, float) else value), key
    assert list(ours.tensors) == [t.name for t in theirs.tensors]
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.shape == tuple(int(n) for n in reversed(tensor.shape))
        np.testing.assert_array_equal(ours.bytes_of(mine), tensor.data.view(np.uint8).reshape(-1))


def test_end_of_turn_tokens_end_a_generation(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_gguf("llama", tmp_path, metadata={"tokenizer.ggml.eot_token_id": 3}))
    # eos (<|im_end|>), the declared end of turn, and the other well-known control token
    assert checkpoint.generation_config["eos_token_id"] == [287, 3, 285]


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    path = tiny_gguf("llama", tmp_path, metadata={"llama.block_count": None})
    with pytest.raises(CheckpointError, match=r"lacks the metadata llama\.block_count"):
        open_checkpoint(path)


def test_a_file_goes_by_its_own_name(tmp_path: Path) -> None:
    path = tiny_gguf("llama", tmp_path).rename(tmp_path / "Tiny-1.5B-Instruct.Q4_1.gguf")
    assert open_checkpoint(path).name == "Tiny-1.5B-Instruct.Q4_1"
