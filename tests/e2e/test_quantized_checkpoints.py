"""Engines of checkpoints that others quantised, against ``transformers`` with the dequantised weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import pelton
from pelton.builder.refit import refit
from pelton.engine.artifact import open_engine
from pelton.errors import CheckpointError
from tests.checkpoint import packers
from tests.checkpoint.packers import Packed, quantized_checkpoint
from tests.checkpoint.test_quantized_formats import (
    FP8_INPUTS,
    INT8_INPUTS,
    Pack,
    bnb,
    ct_integers,
    fp8,
    group_config,
)
from tests.e2e.test_architectures import EXACT, SMALL, check_against


def nvfp4(weight: torch.Tensor, name: str) -> Packed:
    codes, scale, tensor, values = packers.fp4(weight)
    names = {"weight": codes, "weight_scale": scale, "weight_scale_2": torch.tensor(tensor)}
    return Packed(names, values)


def act_order(weight: torch.Tensor, name: str) -> Packed:
    """q, k and v share an order, as do gate and up: they have the same inputs."""
    order = packers.act_order(weight.shape[1], 32, seed=len(name.split("_proj")[0].rsplit(".", 1)[0]))
    return packers.gptq(weight, group=32, sym=False, order=order)


#: A config and a packer for each format; of the act-order one a model whose stacked projections differ.
CASES: dict[str, tuple[dict[str, Any], Pack]] = {
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False},
        lambda w, name: packers.gptq(w, group=32, sym=False),
    ),
    "gptq of 3 bits": (
        {"quant_method": "gptq", "bits": 3, "group_size": 128, "sym": True, "desc_act": False},
        lambda w, name: packers.gptq(w, bits=3),
    ),
    "gptq in act-order": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": True},
        act_order,
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"},
        lambda w, name: packers.awq(w, group=64),
    ),
    "pack-quantized": (
        group_config(
            "pack-quantized", num_bits=4, type="int", symmetric=True, strategy="group", group_size=64
        ),
        ct_integers(4, 64, sym=True),
    ),
    "int-quantized": (
        group_config(
            "int-quantized",
            activations=INT8_INPUTS,
            num_bits=8,
            type="int",
            symmetric=True,
            strategy="channel",
        ),
        ct_integers(8, -1, sym=True, packed=False),
    ),
    "float-quantized": (
        group_config(
            "float-quantized",
            activations=FP8_INPUTS,
            num_bits=8,
            type="float",
            symmetric=True,
            strategy="tensor",
        ),
        fp8("scalar"),
    ),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, fp8("block", "weight_scale_inv")),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, nvfp4),
    "bitsandbytes": ({"quant_method": "bitsandbytes"}, bnb("nf4", 64, nested=True)),
}


@pytest.mark.parametrize("case", CASES)
def test_an_engine_computes_with_the_dequantised_weights(case: str, tmp_path: Path) -> None:
    config, pack = CASES[case]
    model = quantized_checkpoint(tmp_path / "m", config, pack)
    model.set_attn_implementation("eager")
    engine = tmp_path / "x.engine"
    pelton.build(tmp_path / "m", pelton.BuildConfig(**EXACT, **SMALL), output=engine)
    check_against(model, engine, 1e-4)


def test_projections_that_are_stacked_with_others_that_are_not_quantised(tmp_path: Path) -> None:
    def pack(weight: torch.Tensor, name: str) -> Packed:
        if name.endswith(("k_proj", "up_proj")):
            return Packed({"weight": weight}, weight)
        return packers.awq(weight, group=64)

    config = {"quant_method": "awq", "bits": 4, "group_size": 64, "modules_to_not_convert": ["k_proj"]}
    model = quantized_checkpoint(tmp_path / "m", config, pack, arch="qwen2", tie_word_embeddings=False)
    model.set_attn_implementation("eager")
    engine = tmp_path / "x.engine"
    pelton.build(tmp_path / "m", pelton.BuildConfig(**EXACT, **SMALL), output=engine)
    check_against(model, engine, 1e-4)


@pytest.mark.parametrize("arch", ["llama", "phi3"])
def test_act_order_weights_stay_blocks(arch: str, tmp_path: Path) -> None:
    config, pack = CASES["gptq in act-order"]
    model = quantized_checkpoint(tmp_path / "m", config, pack, arch=arch, pad_token_id=None)
    model.set_attn_implementation("eager")
    engine = tmp_path / "x.engine"
    report = pelton.build(tmp_path / "m", pelton.BuildConfig(**EXACT, **SMALL), output=engine)
    (found,) = (p for p in report.passes if p.name == "permute_inputs")
    assert found.changed == 8 and not found.skipped  # four products a layer
    opened = open_engine(engine)
    assert {b.quant for b in opened.plan.buffers if "proj.weight" in b.name} == {"int4_g32"}
    # Down's is in the rows of gate and up.
    assert sum(i.op == "take_columns" for i in opened.plan.instructions) == 6
    check_against(model, engine, 1e-4)


def test_act_order_weights_are_dequantised_without_the_pass(tmp_path: Path) -> None:
    config, pack = CASES["gptq in act-order"]
    model = quantized_checkpoint(tmp_path / "m", config, pack)
    model.set_attn_implementation("eager")
    engine = tmp_path / "x.engine"
    settings = pelton.BuildConfig(**EXACT, **SMALL, passes={"permute_inputs": "off"})
    pelton.build(tmp_path / "m", settings, output=engine)
    check_against(model, engine, 1e-4)


def test_what_a_checkpoint_says_of_inputs_and_caches_and_is_not_done_is_reported(tmp_path: Path) -> None:
    config, pack = CASES["int-quantized"]
    config = {**config, "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": True}}
    quantized_checkpoint(tmp_path / "m", config, pack)
    settings = pelton.BuildConfig(**EXACT, **SMALL)
    report = pelton.build(tmp_path / "m", settings, output=tmp_path / "x.engine", dry_run=True)
    assert (
        "the checkpoint quantises the inputs of 14 products to int8 per token; here they are float32"
        in report.notes
    )
    assert (
        "the checkpoint quantises KV caches to fp8; here they are float32 (kv_dtype fp8 quantises them too)"
        in report.notes
    )


@pytest.mark.parametrize("per_head", [False, True])
def test_scales_of_kv_caches_are_the_checkpoints(per_head: bool, tmp_path: Path) -> None:
    config, pack = CASES["float-quantized"]
    config = {**config, "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}}
    given = {
        f"model.layers.{layer}.self_attn.{kind}_scale": torch.tensor(
            [value, 2 * value] if per_head else [value]
        )
        for layer, kind, value in ((0, "k", 0.125), (0, "v", 0.25), (1, "k", 0.5), (1, "v", 1.0))
    }
    quantized_checkpoint(tmp_path / "m", config, pack, others=given)
    settings = pelton.BuildConfig(**{**EXACT, "kv_dtype": "fp8"}, **SMALL)
    report = pelton.build(tmp_path / "m", settings, output=tmp_path / "x.engine")
    assert "scales of KV caches are the checkpoint's" in report.notes
    engine = open_engine(tmp_path / "x.engine")
    for name, values in (("k_scale.0", (0.125, 0.25)), ("v_scale.1", (1.0, 2.0))):
        found = engine.weights[name].view("float32")[:2]
        assert found.tolist() == [values[0], values[1] if per_head else values[0]]


def test_scales_of_kv_caches_that_do_not_fit(tmp_path: Path) -> None:
    config, pack = CASES["float-quantized"]
    others = {f"model.layers.0.self_attn.{kind}_scale": torch.ones(1) for kind in "kv"}
    quantized_checkpoint(tmp_path / "m", config, pack, others=others)
    settings = pelton.BuildConfig(**{**EXACT, "kv_dtype": "fp8"}, **SMALL)
    with pytest.raises(CheckpointError, match="has k scales of KV caches that do not fit its 2 layers of 2"):
        pelton.build(tmp_path / "m", settings, output=tmp_path / "x.engine")


@pytest.mark.parametrize("arch", ["gpt2", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3"])
def test_other_architectures(arch: str, tmp_path: Path) -> None:
    """GPTQ, in act-order where layers share inputs; GPT-2's layers are transposed and its sizes small."""
    if arch == "gpt2":
        config, pack = CASES["gptq"]
    else:
        config, pack = CASES["gptq in act-order"]
    fields = {} if arch == "gpt2" else {"head_dim": 32, "pad_token_id": None}
    model = quantized_checkpoint(tmp_path / "m", config, pack, arch=arch, **fields)
    model.set_attn_implementation("eager")
    engine = tmp_path / "x.engine"
    pelton.build(tmp_path / "m", pelton.BuildConfig(**EXACT, **SMALL), output=engine)
    check_against(model, engine, 1e-4)


def test_an_imported_model(tmp_path: Path) -> None:
    config, pack = CASES["awq"]
    model = quantized_checkpoint(tmp_path / "m", config, pack, arch="llama")
    model.set_attn_implementation("eager")
    engine = tmp_path / "x.engine"
    settings = pelton.BuildConfig(**EXACT, **SMALL, model_impl="transformers")
    pelton.build(tmp_path / "m", settings, output=engine)
    check_against(model, engine, 1e-4)


@pytest.mark.parametrize("case", ["awq", "gptq in act-order", "int-quantized"])
def test_refitting_with_another_checkpoint_of_the_format(case: str, tmp_path: Path) -> None:
    config, pack = CASES[case]
    quantized_checkpoint(tmp_path / "old", config, pack)

    def other(weight: torch.Tensor, name: str) -> Packed:
        if "desc_act" not in config or not config["desc_act"]:
            return pack(weight, name)
        return packers.gptq(
            weight, group=32, sym=False, order=packers.act_order(weight.shape[1], 32, seed=100)
        )

    model = quantized_checkpoint(tmp_path / "new", config, other, seed=1)
    model.set_attn_implementation("eager")
    settings = pelton.BuildConfig(**EXACT, **SMALL)
    pelton.build(tmp_path / "old", settings, output=tmp_path / "x.engine")
    refit(tmp_path / "x.engine", tmp_path / "new")
    check_against(model, tmp_path / "x.engine", 1e-4)


@pytest.mark.parametrize(
    ("case", "stored"),
    [("gptq in act-order", "int4_g32"), ("int-quantized", "int8_row"), ("modelopt", "q8_0")],
)
def test_a_usual_build_keeps_what_kernels_read_and_says_what_it_rounds(
    case: str, stored: str, tmp_path: Path
) -> None:
    config, pack = CASES[case]
    quantized_checkpoint(tmp_path / "m", config, pack, dtype="bfloat16")
    report = pelton.build(tmp_path / "m", pelton.BuildConfig(**SMALL), output=tmp_path / "x.engine")
    engine = open_engine(tmp_path / "x.engine")
    assert {b.quant for b in engine.plan.buffers if "_proj.weight" in b.name} == {stored}
    assert report.quality is not None
    assert any("repacked as q8_0, relative error" in note for note in report.notes) == (stored == "q8_0")
