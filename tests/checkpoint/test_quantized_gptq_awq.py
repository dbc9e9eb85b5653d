"""GPTQ and AWQ checkpoints: every layout against an independent packer, and logits against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pelton.ir.blocks import dequantize
from pelton.ir.recipe import Transpose
from pelton.models.checkpoint import Checkpoint, check_tensors, open_checkpoint
from tests.checkpoint import packers
from tests.checkpoint.packers import Packed, assert_same_weights, quantized_checkpoint

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group", [32, 64, 128, -1])
@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_gptq(bits: int, group: int, sym: bool, version: str, tmp_path: Path) -> None:
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "sym": sym,
        "desc_act": False,
        "checkpoint_format": version,
    }

    def pack(weight: torch.Tensor, name: str) -> Packed:
        return packers.gptq(weight, bits=bits, group=group, sym=sym, version=version)

    model = quantized_checkpoint(tmp_path / "m", config, pack, num_hidden_layers=1)
    checkpoint = open_checkpoint(tmp_path / "m")
    assert checkpoint.tensors[Q_PROJ].quant == f"int{bits}_g{128 if group == -1 else group}"
    assert checkpoint.tensors[Q_PROJ].shape == (128, 128)
    assert_same_weights(checkpoint, model)
    assert checkpoint.read_notes() == []


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_zero_points_of_0_borrow_from_their_neighbours_in_gptq_v1(bits: int, tmp_path: Path) -> None:
    config = {"quant_method": "gptq", "bits": bits, "group_size": 32, "sym": False, "desc_act": False}

    def pack(weight: torch.Tensor, name: str) -> Packed:
        positive = weight.clone()
        positive[::3] = positive[::3].abs()
        return packers.gptq(positive, bits=bits, group=32, sym=False)

    model = quantized_checkpoint(tmp_path / "m", config, pack, num_hidden_layers=1)
    assert_same_weights(open_checkpoint(tmp_path / "m"), model)


@pytest.mark.parametrize("bits", [4, 8])
def test_gptq_in_act_order(bits: int, tmp_path: Path) -> None:
    config = {"quant_method": "gptq", "bits": bits, "group_size": 32, "desc_act": True, "sym": False}

    def pack(weight: torch.Tensor, name: str) -> Packed:
        order = packers.act_order(weight.shape[1], 32)
        return packers.gptq(weight, bits=bits, group=32, sym=False, order=order)

    model = quantized_checkpoint(tmp_path / "m", config, pack, num_hidden_layers=1)
    assert_same_weights(open_checkpoint(tmp_path / "m"), model)


def test_act_order_with_neighbouring_groups_is_none(tmp_path: Path) -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}
    model = quantized_checkpoint(
        tmp_path / "m", config, lambda w, name: packers.gptq(w, group=32), num_hidden_layers=1
    )
    checkpoint = open_checkpoint(tmp_path / "m")
    assert checkpoint.tensors[Q_PROJ].quant == "int4_g32"
    assert_same_weights(checkpoint, model)


def test_a_group_size_without_a_block_type_is_dequantised_and_said(tmp_path: Path) -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 16}
    model = quantized_checkpoint(
        tmp_path / "m", config, lambda w, name: packers.gptq(w, group=16), num_hidden_layers=1
    )
    checkpoint = open_checkpoint(tmp_path / "m")
    info = checkpoint.tensors[Q_PROJ]
    assert (info.quant, info.note) == ("int4_g16", "int4_g16 has no Pelton block type: read as float32")
    assert_same_weights(checkpoint, model)


def test_bfloat16_scales_are_kept_and_float32_ones_rounded_loudly(tmp_path: Path) -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32}

    def write(kind: torch.dtype) -> tuple[Checkpoint, Any]:
        folder = tmp_path / str(kind)
        model = quantized_checkpoint(
            folder,
            config,
            lambda w, name: packers.gptq(w, group=32, scale_dtype=kind),
            num_hidden_layers=1,
        )
        return open_checkpoint(folder), model

    exact, model = write(torch.bfloat16)
    assert_same_weights(exact, model)
    assert exact.read_notes() == []
    rounded, model = write(torch.float32)
    assert_same_weights(rounded, model, atol=2e-3)
    (note,) = rounded.read_notes()
    assert note.startswith(f"{Q_PROJ} and 6 more: scales rounded to float16, relative error up to")
    assert 1e-5 < float(note.rsplit(" ", 1)[1]) < 5e-4


def test_modules_with_settings_of_their_own(tmp_path: Path) -> None:
    config = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "dynamic": {r"-:.*k_proj": {}, r"+:.*\.down_proj": {"bits": 8, "group_size": 32}},
    }

    def pack(weight: torch.Tensor, name: str) -> Packed:
        if "down_proj" in name:
            return packers.gptq(weight, bits=8, group=32)
        if "k_proj" in name:
            return Packed({"weight": weight}, weight)
        return packers.gptq(weight)

    model = quantized_checkpoint(tmp_path / "m", config, pack, num_hidden_layers=1)
    checkpoint = open_checkpoint(tmp_path / "m")
    quants = {name: info.quant for name, info in checkpoint.tensors.items()}
    assert quants["model.layers.0.mlp.down_proj.weight"] == "int8_g32"
    assert quants["model.layers.0.self_attn.k_proj.weight"] == "float32"
    assert_same_weights(checkpoint, model)


def test_zero_biases_that_autogptq_adds_are_left_out(tmp_path: Path) -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 128}

    def pack(weight: torch.Tensor, name: str) -> Packed:
        packed = packers.gptq(weight)
        return Packed({**packed.tensors, "bias": torch.zeros(len(weight))}, packed.values)

    model = quantized_checkpoint(tmp_path / "m", config, pack, num_hidden_layers=1)
    expected = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    (note,) = check_tensors(expected, open_checkpoint(tmp_path / "m"))
    assert note.startswith("left out 7 tensors (") and note.endswith("the model has no biases there")


def test_a_conv1d_layer_is_a_linear_one_to_a_quantiser(tmp_path: Path) -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 64}
    model = quantized_checkpoint(
        tmp_path / "m", config, lambda w, name: packers.gptq(w, group=64), arch="gpt2"
    )
    checkpoint = open_checkpoint(tmp_path / "m")
    for name in ("transformer.h.0.attn.c_attn.weight", "transformer.h.1.mlp.c_proj.weight"):
        assert checkpoint.tensors[name].quant == "int4_g64"
        assert isinstance(checkpoint.source(name), Transpose)
        np.testing.assert_array_equal(dequantize(checkpoint.read(name)).T, model.state_dict()[name].numpy())


@pytest.mark.parametrize("version", ["gemm", "gemv", "gemv_fast"])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_awq(version: str, group: int, tmp_path: Path) -> None:
    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "zero_point": True,
        "version": version,
        "modules_to_not_convert": None,
    }
    model = quantized_checkpoint(
        tmp_path / "m",
        config,
        lambda w, name: packers.awq(w, group=group, version=version),
        num_hidden_layers=1,
    )
    checkpoint = open_checkpoint(tmp_path / "m")
    assert checkpoint.tensors[Q_PROJ].quant == f"int4_g{group}"
    assert_same_weights(checkpoint, model)


@pytest.mark.parametrize("file", ["quantize_config.json", "quant_config.json"])
def test_settings_in_a_file_of_their_own(file: str, tmp_path: Path) -> None:
    if file == "quantize_config.json":
        settings: dict[str, Any] = {"bits": 4, "group_size": 128, "desc_act": False, "sym": True}
        model = quantized_checkpoint(tmp_path / "m", None, lambda w, name: packers.gptq(w))
    else:
        settings = {"w_bit": 4, "q_group_size": 128, "zero_point": True, "version": "GEMM"}
        model = quantized_checkpoint(tmp_path / "m", None, lambda w, name: packers.awq(w))
    (tmp_path / "m" / file).write_text(json.dumps(settings))
    assert_same_weights(open_checkpoint(tmp_path / "m"), model)


@pytest.mark.parametrize("packing", ["auto_round", "auto_round:auto_gptq", "auto_round:auto_awq"])
def test_auto_round(packing: str, tmp_path: Path) -> None:
    config = {
        "quant_method": "auto-round",
        "packing_format": packing,
        "bits": 4,
        "group_size": 64,
        "sym": False,
        "data_type": "int",
    }
    if "awq" not in packing:
        config["extra_config"] = {"model.layers.0.mlp.down_proj": {"bits": 8, "group_size": 32}}

    def pack(weight: torch.Tensor, name: str) -> Packed:
        if "awq" in packing:
            return packers.awq(weight, group=64)
        version = "gptq" if packing.endswith("gptq") else "gptq_v2"
        own = {"bits": 8, "group": 32} if "down_proj" in name else {"bits": 4, "group": 64}
        packed = packers.gptq(weight, sym=False, version=version, **own)
        del packed.tensors["g_idx"]
        return packed

    model = quantized_checkpoint(tmp_path / "m", config, pack, num_hidden_layers=1)
    assert_same_weights(open_checkpoint(tmp_path / "m"), model)
