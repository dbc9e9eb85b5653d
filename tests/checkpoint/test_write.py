"""Quantised checkpoints written: read back equal, and in the formats' own words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from pelton.dtypes import GROUP_BLOCK_TYPES
from pelton.errors import CheckpointError, ConfigError
from pelton.ir.activation_quant import ActivationQuant
from pelton.ir.blocks import dequantize
from pelton.ir.group_encoder import encode
from pelton.ir.tensors import HostTensor
from pelton.models.checkpoint import Checkpoint, open_checkpoint
from pelton.models.checkpoint.write import write_checkpoint
from pelton.quant.config import QuantConfig
from tests.checkpoint import packers
from tests.checkpoint.makers import tiny_gguf, tiny_hf_checkpoint
from tests.checkpoint.packers import SIZES

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
INTEGERS = [q for q in GROUP_BLOCK_TYPES if q.startswith("int")]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(tiny_hf_checkpoint("llama", tmp_path_factory.mktemp("base"), **SIZES))


def quantised(base: Checkpoint, quant: str, *, symmetric: bool = True) -> Iterator[tuple[str, HostTensor]]:
    for name in base.tensors:
        if name.endswith("_proj.weight"):
            yield name, encode(dequantize(base.read(name)), quant, symmetric=symmetric)


def assert_same(written: Path, base: Checkpoint, tensors: dict[str, HostTensor], quant: str) -> None:
    checkpoint = open_checkpoint(written)
    assert checkpoint.tensors.keys() == base.tensors.keys()
    for name in base.tensors:
        found, expected = checkpoint.read(name), tensors.get(name) or base.read(name)
        assert found.quant == (quant if name in tensors else expected.quant)
        if quant == "nvfp4":  # its tensor's scale is stored as one over it
            np.testing.assert_allclose(dequantize(found), dequantize(expected), rtol=2e-7)
        else:
            np.testing.assert_array_equal(found.data, expected.data, err_msg=name)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("quant", [*INTEGERS, "fp8_row", "fp8_g128", "nvfp4", "mxfp4"])
def test_compressed_tensors(quant: str, symmetric: bool, base: Checkpoint, tmp_path: Path) -> None:
    tensors = dict(quantised(base, quant, symmetric=symmetric))
    config = QuantConfig(weights=quant, symmetric=symmetric)
    write_checkpoint(tmp_path / "out", base, iter(tensors.items()), config)
    assert_same(tmp_path / "out", base, tensors, quant)
    written = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert written["ignore"] == ["lm_head"]
    (group,) = written["config_groups"].values()
    assert group["targets"] == ["Linear"]
    if quant.startswith("int") and quant != "int8_row":
        assert group["weights"]["symmetric"] == symmetric


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("quant", INTEGERS)
def test_gptq(quant: str, symmetric: bool, base: Checkpoint, tmp_path: Path) -> None:
    tensors = dict(quantised(base, quant, symmetric=symmetric))
    config = QuantConfig(weights=quant, symmetric=symmetric)
    write_checkpoint(tmp_path / "out", base, iter(tensors.items()), config, "gptq")
    written = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert written["checkpoint_format"] == ("gptq" if symmetric else "gptq_v2")
    # int8_row comes back with a scale a row, which GPTQ's config calls groups of all columns.
    if quant != "int8_row":
        assert_same(tmp_path / "out", base, tensors, quant)
    else:
        assert open_checkpoint(tmp_path / "out").tensors[Q_PROJ].quant == "int8_g128"


def test_bitsandbytes(base: Checkpoint, tmp_path: Path) -> None:
    tensors = dict(quantised(base, "nf4_g64"))
    write_checkpoint(
        tmp_path / "nf4", base, iter(tensors.items()), QuantConfig(weights="nf4_g64"), "bitsandbytes"
    )
    assert_same(tmp_path / "nf4", base, tensors, "nf4_g64")
    tensors = dict(quantised(base, "int8_row"))
    config = QuantConfig(weights="int8_row", activations=ActivationQuant("int8", outliers=5.0))
    write_checkpoint(tmp_path / "int8", base, iter(tensors.items()), config, "bitsandbytes")
    checkpoint = open_checkpoint(tmp_path / "int8")
    assert checkpoint.activation_quant(Q_PROJ) == ActivationQuant("int8", outliers=5.0)
    np.testing.assert_allclose(dequantize(checkpoint.read(Q_PROJ)), dequantize(tensors[Q_PROJ]), rtol=3e-7)


@pytest.mark.parametrize(
    ("quant", "activation"),
    [
        ("int8_row", ActivationQuant("int8")),
        ("int8_row", ActivationQuant("int8", per="tensor", scale=0.25)),
        ("fp8_row", ActivationQuant("fp8")),
        ("fp8_row", ActivationQuant("fp8", per="tensor", scale=0.5)),
        ("fp8_g128", ActivationQuant("fp8", group=128)),
        ("int4_g128", ActivationQuant("int8")),
    ],
)
def test_activations_come_back(
    quant: str, activation: ActivationQuant, base: Checkpoint, tmp_path: Path
) -> None:
    tensors = dict(quantised(base, quant))
    config = QuantConfig(weights=quant, activations=activation)
    write_checkpoint(tmp_path / "out", base, iter(tensors.items()), config)
    assert_same(tmp_path / "out", base, tensors, quant)
    checkpoint = open_checkpoint(tmp_path / "out")
    assert {checkpoint.activation_quant(name) for name in tensors} == {activation}


def test_a_scale_of_its_own_for_each_input(base: Checkpoint, tmp_path: Path) -> None:
    tensors = dict(quantised(base, "fp8_row"))
    scales = {name: float(i + 1) for i, name in enumerate(tensors)}

    def activation(name: str) -> ActivationQuant:
        return ActivationQuant("fp8", per="tensor", scale=scales[name])

    config = QuantConfig(weights="fp8_row")
    write_checkpoint(tmp_path / "out", base, iter(tensors.items()), config, activation_of=activation)
    checkpoint = open_checkpoint(tmp_path / "out")
    assert [checkpoint.activation_quant(name) for name in scales] == [activation(name) for name in scales]


@pytest.mark.parametrize("fmt", ["compressed-tensors", "gptq"])
def test_several_types_and_a_quantised_head(fmt: str, base: Checkpoint, tmp_path: Path) -> None:
    tensors = {}
    for name in base.tensors:
        if (name.endswith("_proj.weight") and "v_proj" not in name) or name == "lm_head.weight":
            quant = "int8_g32" if "down_proj" in name or "lm_head" in name else "int4_g64"
            tensors[name] = encode(dequantize(base.read(name)), quant, symmetric=True)
    write_checkpoint(tmp_path / "out", base, iter(tensors.items()), QuantConfig(), fmt)
    checkpoint = open_checkpoint(tmp_path / "out")
    for name in base.tensors:
        expected = tensors.get(name) or base.read(name)
        assert checkpoint.tensors[name].quant == expected.quant
        np.testing.assert_array_equal(checkpoint.read(name).data, expected.data, err_msg=name)


def test_folders_hold_what_the_base_has_and_shards_an_index(base: Checkpoint, tmp_path: Path) -> None:
    tensors = dict(quantised(base, "int4_g64"))
    out = tmp_path / "out"
    write_checkpoint(out, base, iter(tensors.items()), QuantConfig(), max_shard=100_000)
    names = {file.name for file in out.iterdir()}
    assert {"config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"} <= names
    shards = sorted(name for name in names if name.endswith(".safetensors"))
    assert len(shards) > 2 and shards[0] == f"model-00001-of-{len(shards):05}.safetensors"
    assert not [name for name in names if name.endswith(".partial")]
    index = json.loads((out / "model.safetensors.index.json").read_text())
    for shard in shards:  # as the official library reads it
        with safe_open(out / shard, "np") as file:
            assert {name for name, s in index["weight_map"].items() if s == shard} == set(file.keys())
    assert_same(out, base, tensors, "int4_g64")


def test_a_gguf_file_becomes_a_folder(tmp_path: Path) -> None:
    base = open_checkpoint(tiny_gguf("gemma3", tmp_path, quant="Q4_0", intermediate_size=128))
    tensors: dict[str, Any] = dict(quantised(base, "int4_g32"))
    write_checkpoint(tmp_path / "out", base, iter(tensors.items()), QuantConfig())
    stored = load_file(tmp_path / "out" / "model.safetensors")
    # Hugging Face stores Gemma's norms less one; GGUF does not.
    raw = base.read("model.norm.weight").data
    np.testing.assert_allclose(stored["model.norm.weight"], raw - 1, rtol=1e-6)
    tokenizer = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"
    checkpoint = open_checkpoint(tmp_path / "out")
    (tmp_path / "tokenizer").mkdir()
    checkpoint.write_tokenizer(tmp_path / "tokenizer")
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(checkpoint.read(name).data, tensor.data)


def test_an_error_on_the_way_leaves_nothing(base: Checkpoint, tmp_path: Path) -> None:
    def broken() -> Iterator[tuple[str, HostTensor]]:
        yield next(quantised(base, "int4_g64"))
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        write_checkpoint(tmp_path / "out", base, broken(), QuantConfig())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("fmt", "quant", "config", "message"),
    [
        ("compressed-tensors", "nf4_g64", {}, "is nf4_g64, which compressed-tensors does not have"),
        ("gptq", "fp8_row", {}, "is fp8_row, and GPTQ's layout has integers only"),
        ("gptq", "int8_row", {"activations": ActivationQuant("int8")}, "has no quantised activations"),
        ("bitsandbytes", "int4_g64", {}, "a bitsandbytes checkpoint is all nf4_g64 or all int8_row"),
        ("gguf", "int4_g64", {}, "unknown checkpoint format 'gguf' \\(known: compressed-tensors, gptq, "),
        (
            "compressed-tensors",
            "int8_row",
            {"activations": ActivationQuant("int8", outliers=6.0)},
            "outliers that stay exact \\(LLM.int8\\) have no form in compressed-tensors",
        ),
    ],
)
def test_what_a_format_does_not_have(
    fmt: str, quant: str, config: dict[str, Any], message: str, base: Checkpoint, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        write_checkpoint(tmp_path / "out", base, quantised(base, quant), QuantConfig(**config), fmt)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(base: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="out exists; remove it or choose another output"):
        write_checkpoint(tmp_path / "out", base, quantised(base, "int4_g64"), QuantConfig())


def test_gptq_groups_are_of_one_size_where_widths_allow_different_ones(tmp_path: Path) -> None:
    sizes = {**SIZES, "hidden_size": 192, "num_attention_heads": 6}
    base = open_checkpoint(tiny_hf_checkpoint("llama", tmp_path, **sizes))
    tensors = {}
    for name in base.tensors:
        if name.endswith("_proj.weight"):
            quant = "int4_g128" if "down_proj" in name else "int4_g64"
            tensors[name] = encode(dequantize(base.read(name)), quant, symmetric=True)
    write_checkpoint(tmp_path / "out", base, iter(tensors.items()), QuantConfig(), "gptq")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["group_size"] == 64 and "dynamic" not in config
    checkpoint = open_checkpoint(tmp_path / "out")
    for name, tensor in tensors.items():
        assert checkpoint.tensors[name].quant == "int4_g64"
        np.testing.assert_array_equal(dequantize(checkpoint.read(name)), dequantize(tensor))


def test_a_base_that_others_quantised_in_act_order(tmp_path: Path) -> None:
    """What is not quantised anew is written as its values, its columns in order."""

    def pack(weight: Any, name: str) -> packers.Packed:
        order = packers.act_order(weight.shape[1], 32)
        return packers.gptq(weight, group=32, order=order)

    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": True}
    model = packers.quantized_checkpoint(tmp_path / "base", config, pack)
    base = open_checkpoint(tmp_path / "base")
    values = model.state_dict()
    tensors = {Q_PROJ: encode(values[Q_PROJ].numpy(), "int8_g32", symmetric=True)}
    write_checkpoint(tmp_path / "out", base, iter(tensors.items()), QuantConfig())
    checkpoint = open_checkpoint(tmp_path / "out")
    assert checkpoint.tensors.keys() == values.keys()
    assert checkpoint.read(Q_PROJ).quant == "int8_g32"
    for name in checkpoint.tensors.keys() - {Q_PROJ}:
        np.testing.assert_array_equal(checkpoint.read(name).data, values[name].numpy(), err_msg=name)


@pytest.mark.parametrize("kv", ["int8", "fp8"])
def test_types_and_scales_of_kv_caches_come_back(kv: Any, base: Checkpoint, tmp_path: Path) -> None:
    tensors = dict(quantised(base, "int8_row"))
    config = QuantConfig(weights="int8_row", kv=kv)
    scales = {
        f"model.layers.{layer}.self_attn.{kind}_scale": 0.5 + layer + (kind == "v") / 4
        for layer in range(base.config["num_hidden_layers"])
        for kind in "kv"
    }
    write_checkpoint(tmp_path / "out", base, iter(tensors.items()), config, kv_scales=scales)
    assert_same(tmp_path / "out", base, tensors, "int8_row")
    found = open_checkpoint(tmp_path / "out").kv_quant()
    assert found is not None
    assert found.dtype == kv
    for kind, values in (("k", found.k_scales), ("v", found.v_scales)):
        named = [scale for name, scale in scales.items() if name.endswith(f"{kind}_scale")]
        assert [value for (value,) in values] == named
