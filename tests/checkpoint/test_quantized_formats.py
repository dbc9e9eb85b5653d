"""fp8, compressed-tensors, ModelOpt and bitsandbytes checkpoints against independent packers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pelton.ir.activation_quant import ActivationQuant
from pelton.ir.group_blocks import NF4
from pelton.ir.kv_quant import KVQuant
from pelton.models.checkpoint import open_checkpoint
from tests.checkpoint import packers
from tests.checkpoint.packers import Packed, Tensors, assert_same_weights, quantized_checkpoint

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
Pack = Callable[[torch.Tensor, str], Packed]


def fp8(shape: str, scale_name: str = "weight_scale", **extra: torch.Tensor) -> Pack:
    """``shape``: of the scales."""

    def pack(weight: torch.Tensor, name: str) -> Packed:
        block = (128, 128) if shape == "block" else (96, 48) if shape == "odd block" else None
        packed = packers.fp8(weight, block=block, row=shape in ("row", "row vector"))
        scale = packed.tensors["scale"]
        if shape in ("scalar", "row vector"):
            scale = scale.reshape(() if shape == "scalar" else -1)
        return Packed({"weight": packed.tensors["weight"], scale_name: scale, **extra}, packed.values)

    return pack


CASES: dict[str, tuple[dict[str, Any], Pack, str, ActivationQuant | None]] = {
    "DeepSeek": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        fp8("block", "weight_scale_inv"),
        "fp8_g128",
        ActivationQuant("fp8", group=128),
    ),
    "blocks that no type holds": (
        {"quant_method": "fp8", "weight_block_size": [96, 48]},
        fp8("odd block", "weight_scale_inv"),
        "fp8_96x48",
        ActivationQuant("fp8", group=48),
    ),
    "static fp8": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        fp8("scalar", input_scale=torch.tensor(0.25)),
        "fp8_row",
        ActivationQuant("fp8", per="tensor", scale=0.25),
    ),
    "fbgemm": (
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
        fp8("row"),
        "fp8_row",
        ActivationQuant("fp8"),
    ),
    "ModelOpt fp8": (
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
        fp8("scalar", input_scale=torch.tensor([0.5])),
        "fp8_row",
        ActivationQuant("fp8", per="tensor", scale=0.5),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_fp8(case: str, tmp_path: Path) -> None:
    config, pack, quant, activation = CASES[case]
    model = quantized_checkpoint(tmp_path / "m", config, pack, num_hidden_layers=1)
    checkpoint = open_checkpoint(tmp_path / "m")
    assert checkpoint.tensors[Q_PROJ].quant == quant
    assert checkpoint.activation_quant(Q_PROJ) == activation
    assert checkpoint.activation_quant("lm_head.weight") is None
    assert_same_weights(checkpoint, model)


def group_config(
    form: str,
    *,
    activations: dict[str, Any] | None = None,
    ignore: tuple[str, ...] = ("lm_head",),
    targets: tuple[str, ...] = ("Linear",),
    **weights: Any,
) -> dict[str, Any]:
    group = {"targets": list(targets), "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
    }


def ct_integers(bits: int, group: int, *, sym: bool, packed: bool = True, tensor: bool = False) -> Pack:
    def pack(weight: torch.Tensor, name: str) -> Packed:
        if tensor:
            codes, scale, zero, values = packers.groups(weight.reshape(1, -1), bits, -1, sym=sym)
            codes, values = codes.reshape(weight.shape), values.reshape(weight.shape)
            scale, zero = scale.reshape(1), zero.reshape(1)
        else:
            codes, scale, zero, values = packers.groups(weight, bits, group, sym=sym)
        middle = 1 << (bits - 1)
        tensors: Tensors = {"weight_scale": scale}
        if packed:
            tensors |= {
                "weight_packed": packers.words(codes, bits),
                "weight_shape": torch.tensor(weight.shape),
            }
            if not sym:
                tensors["weight_zero_point"] = packers.words(zero.T, bits).T
        else:
            tensors["weight"] = (codes - middle).to(torch.int8)
            if not sym:
                tensors["weight_zero_point"] = (zero - middle).to(torch.int8)
        return Packed(tensors, values)

    return pack


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("group", [32, 128, -1])
def test_pack_quantized(bits: int, sym: bool, group: int, tmp_path: Path) -> None:
    strategy = {"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group}
    config = group_config("pack-quantized", num_bits=bits, type="int", symmetric=sym, **strategy)
    model = quantized_checkpoint(tmp_path / "m", config, ct_integers(bits, group, sym=sym))
    checkpoint = open_checkpoint(tmp_path / "m")
    row = bits == 8 and sym and group == -1
    expected = "int8_row" if row else f"int{bits}_g{128 if group == -1 else group}"
    assert checkpoint.tensors[Q_PROJ].quant == expected
    assert checkpoint.activation_quant(Q_PROJ) is None
    assert_same_weights(checkpoint, model, atol=2e-7)


INT8_INPUTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


@pytest.mark.parametrize("strategy", ["channel", "tensor"])
@pytest.mark.parametrize("sym", [True, False])
def test_int_quantized(strategy: str, sym: bool, tmp_path: Path) -> None:
    config = group_config(
        "int-quantized",
        activations=INT8_INPUTS,
        num_bits=8,
        type="int",
        symmetric=sym,
        strategy=strategy,
    )
    pack = ct_integers(8, -1, sym=sym, packed=False, tensor=strategy == "tensor")
    model = quantized_checkpoint(tmp_path / "m", config, pack)
    checkpoint = open_checkpoint(tmp_path / "m")
    assert checkpoint.tensors[Q_PROJ].quant == ("int8_row" if sym else "int8_g128")
    assert checkpoint.activation_quant(Q_PROJ) == ActivationQuant("int8")
    assert_same_weights(checkpoint, model)


FP8_INPUTS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
STATIC = {**FP8_INPUTS, "strategy": "tensor", "dynamic": False}


@pytest.mark.parametrize(
    ("shape", "weights", "inputs", "activation"),
    [
        ("scalar", {"strategy": "tensor"}, STATIC, ActivationQuant("fp8", per="tensor", scale=0.125)),
        ("row", {"strategy": "channel"}, FP8_INPUTS, ActivationQuant("fp8")),
        (
            "block",
            {"strategy": "block", "block_structure": [128, 128]},
            {**FP8_INPUTS, "strategy": "group", "group_size": 128},
            ActivationQuant("fp8", group=128),
        ),
    ],
)
def test_float_quantized(
    shape: str,
    weights: dict[str, Any],
    inputs: dict[str, Any],
    activation: ActivationQuant,
    tmp_path: Path,
) -> None:
    config = group_config(
        "float-quantized", activations=inputs, num_bits=8, type="float", symmetric=True, **weights
    )
    extra = {"input_scale": torch.tensor([0.125])} if inputs is STATIC else {}
    model = quantized_checkpoint(tmp_path / "m", config, fp8(shape, **extra))
    checkpoint = open_checkpoint(tmp_path / "m")
    assert checkpoint.tensors[Q_PROJ].quant == ("fp8_g128" if shape == "block" else "fp8_row")
    assert checkpoint.activation_quant(Q_PROJ) == activation
    assert_same_weights(checkpoint, model)


def test_groups_by_name_pattern_and_class_and_what_is_ignored(tmp_path: Path) -> None:
    fours = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    eights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    config = group_config("pack-quantized", ignore=("lm_head", r"re:.*\.v_proj"), **fours)
    config["config_groups"]["group_1"] = {
        "targets": [r"re:.*\.down_proj$", "model.layers.0.self_attn.o_proj"],
        "weights": eights,
    }

    def pack(weight: torch.Tensor, name: str) -> Packed:
        if "v_proj" in name:
            return Packed({"weight": weight}, weight)
        if "down_proj" in name or name == "model.layers.0.self_attn.o_proj":
            return ct_integers(8, -1, sym=True)(weight, name)
        return ct_integers(4, 32, sym=True)(weight, name)

    model = quantized_checkpoint(tmp_path / "m", config, pack)
    checkpoint = open_checkpoint(tmp_path / "m")
    quants = {name: info.quant for name, info in checkpoint.tensors.items()}
    assert quants["model.layers.1.mlp.down_proj.weight"] == "int8_row"
    assert quants["model.layers.0.self_attn.o_proj.weight"] == "int8_row"
    assert quants["model.layers.1.self_attn.o_proj.weight"] == "int4_g32"
    assert quants["model.layers.1.self_attn.v_proj.weight"] == "float32"
    assert_same_weights(checkpoint, model)


def test_compressed_act_order(tmp_path: Path) -> None:
    config = group_config(
        "pack-quantized",
        num_bits=4,
        type="int",
        symmetric=True,
        strategy="group",
        group_size=32,
        actorder="group",
    )

    def pack(weight: torch.Tensor, name: str) -> Packed:
        order = packers.act_order(weight.shape[1], 32)
        codes, scale, _, values = packers.groups(weight, 4, 32, sym=True, order=order)
        tensors = {
            "weight_packed": packers.words(codes, 4),
            "weight_scale": scale,
            "weight_shape": torch.tensor(weight.shape),
            "weight_g_idx": order.int(),
        }
        return Packed(tensors, values)

    model = quantized_checkpoint(tmp_path / "m", config, pack, num_hidden_layers=1)
    assert_same_weights(open_checkpoint(tmp_path / "m"), model)


@pytest.mark.parametrize("maker", ["compressed-tensors", "modelopt"])
def test_nvfp4(maker: str, tmp_path: Path) -> None:
    config = group_config(
        "nvfp4-pack-quantized",
        activations={"num_bits": 4, "type": "float", "strategy": "tensor_group", "dynamic": "local"},
        num_bits=4,
        type="float",
        symmetric=True,
        strategy="tensor_group",
        group_size=16,
    )

    def pack(weight: torch.Tensor, name: str) -> Packed:
        codes, scale, tensor, values = packers.fp4(weight)
        if maker == "modelopt":
            tensors = {
                "weight": codes,
                "weight_scale": scale,
                "weight_scale_2": torch.tensor(tensor),
                "input_scale": torch.tensor(1.0),
            }
        else:
            tensors = {
                "weight_packed": codes,
                "weight_scale": scale,
                "weight_global_scale": torch.tensor([1 / tensor]),
                "input_global_scale": torch.tensor([1.0]),
            }
        return Packed(tensors, values)

    wanted = config if maker == "compressed-tensors" else None
    model = quantized_checkpoint(tmp_path / "m", wanted, pack)
    if wanted is None:
        settings = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
        (tmp_path / "m" / "hf_quant_config.json").write_text(json.dumps(settings))
    checkpoint = open_checkpoint(tmp_path / "m")
    assert checkpoint.tensors[Q_PROJ].quant == "nvfp4"
    assert_same_weights(checkpoint, model, atol=1e-6)


def bnb(kind: str, blocksize: int, *, nested: bool) -> Pack:
    """NF4 and FP4 as bitsandbytes' quantize_4bit: the first value of two in the higher nibble."""
    if kind == "nf4":
        book = torch.tensor(NF4)
    else:
        half = torch.tensor([0, 0.0625, 8, 12, 4, 6, 2, 3]) / 12
        book = torch.cat([half, -half])

    def pack(weight: torch.Tensor, name: str) -> Packed:
        flat = weight.reshape(-1)
        padded = torch.nn.functional.pad(flat, (0, -len(flat) % blocksize)).reshape(-1, blocksize)
        absmax = padded.abs().amax(1)
        tensors: Tensors = {"weight.quant_map": book}
        state: dict[str, Any] = {
            "quant_type": kind,
            "blocksize": blocksize,
            "dtype": "float32",
            "shape": list(weight.shape),
        }
        if nested:
            offset = float(absmax.mean())
            outer = torch.nn.functional.pad(absmax - offset, (0, -len(absmax) % 256)).reshape(-1, 256)
            top = outer.abs().amax(1)
            levels = torch.linspace(-1, 1, 256)
            codes = ((outer / top[:, None])[..., None] - levels).abs().argmin(-1)
            tensors |= {
                "weight.absmax": codes.reshape(-1)[: len(absmax)].to(torch.uint8),
                "weight.nested_absmax": top,
                "weight.nested_quant_map": levels,
            }
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
            absmax = (levels[codes] * top[:, None]).reshape(-1)[: len(absmax)] + offset
        else:
            tensors["weight.absmax"] = absmax
        codes = ((padded / absmax[:, None])[..., None] - book).abs().argmin(-1)
        values = (book[codes] * absmax[:, None]).reshape(-1)[: len(flat)].reshape(weight.shape)
        codes = codes.reshape(-1)[: len(flat)]
        text = json.dumps(state).encode()
        tensors |= {
            "weight": (codes[0::2] * 16 + codes[1::2]).to(torch.uint8)[:, None],
            f"weight.quant_state.bitsandbytes__{kind}": torch.tensor(list(text), dtype=torch.uint8),
        }
        return Packed(tensors, values)

    return pack


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    ("kind", "blocksize", "quant"),
    [("nf4", 64, "nf4_g64"), ("nf4", 256, "nf4_g64"), ("nf4", 32, ""), ("fp4", 64, "")],
)
def test_bitsandbytes_four_bits(kind: str, blocksize: int, quant: str, nested: bool, tmp_path: Path) -> None:
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    model = quantized_checkpoint(
        tmp_path / "m", config, bnb(kind, blocksize, nested=nested), num_hidden_layers=1
    )
    checkpoint = open_checkpoint(tmp_path / "m")
    info = checkpoint.tensors[Q_PROJ]
    assert info.quant == (quant or f"bitsandbytes_{kind}_g{blocksize}")
    assert bool(info.note) == (not quant)
    assert_same_weights(checkpoint, model, atol=1e-6)


def test_llm_int8(tmp_path: Path) -> None:
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0}

    def pack(weight: torch.Tensor, name: str) -> Packed:
        top = weight.abs().amax(1)
        codes = (weight * (127 / top[:, None])).round()
        tensors = {
            "weight": codes.to(torch.int8),
            "SCB": top,
            "weight_format": torch.tensor(0, dtype=torch.uint8),
        }
        return Packed(tensors, codes * top[:, None] / 127)

    model = quantized_checkpoint(tmp_path / "m", config, pack)
    checkpoint = open_checkpoint(tmp_path / "m")
    assert checkpoint.tensors[Q_PROJ].quant == "int8_row"
    assert checkpoint.activation_quant(Q_PROJ) == ActivationQuant("int8", outliers=6.0)
    assert_same_weights(checkpoint, model, atol=1e-6)


@pytest.mark.parametrize("names", ["self_attn.{}_scale", "self_attn.{0}_proj.{0}_scale"])
def test_scales_of_kv_caches(names: str, tmp_path: Path) -> None:
    config = group_config("float-quantized", num_bits=8, type="float", strategy="tensor")
    config["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    others = {
        f"model.layers.{layer}.{names.format(kind)}": torch.tensor([value])
        for layer in (0, 1)
        for kind, value in (("k", 0.5 + layer), ("v", 0.25))
    }
    model = quantized_checkpoint(tmp_path / "m", config, fp8("scalar"), others=others)
    checkpoint = open_checkpoint(tmp_path / "m")
    assert checkpoint.kv_quant() == KVQuant("fp8", ((0.5,), (1.5,)), ((0.25,), (0.25,)))
    assert_same_weights(checkpoint, model)
