"""Quantised checkpoints that cannot be: each refused in one sentence that says what is wrong and where."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pelton.errors import CheckpointError
from pelton.models.checkpoint import assert_finite, check_tensors, open_checkpoint
from tests.checkpoint import packers
from tests.checkpoint.packers import Packed, quantized_checkpoint
from tests.checkpoint.spoil import change_tensors
from tests.checkpoint.test_quantized_formats import Pack, bnb, ct_integers, fp8, group_config

Q = "model.layers.0.self_attn.q_proj"
ONE_LAYER: dict[str, Any] = {"num_hidden_layers": 1}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
PACKED = group_config(
    "pack-quantized", num_bits=4, type="int", symmetric=True, strategy="group", group_size=32
)
BLOCKS: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
BNB: dict[str, Any] = {"quant_method": "bitsandbytes"}


def gptq(weight: torch.Tensor, name: str) -> Packed:
    return packers.gptq(weight, group=32)


def awq(weight: torch.Tensor, name: str) -> Packed:
    return packers.awq(weight, group=32)


Change = Callable[[dict[str, torch.Tensor]], object]

#: config, packer, what is done to the tensors, part of the message.
TENSORS: dict[str, tuple[dict[str, Any], Pack, Change, str]] = {
    "no scales": (GPTQ, gptq, lambda t: t.pop(f"{Q}.scales"), f"has no tensor {Q}.scales, which its"),
    "no zero points": (AWQ, awq, lambda t: t.pop(f"{Q}.qzeros"), f"has no tensor {Q}.qzeros, which its"),
    "scales of another group size": (
        GPTQ,
        gptq,
        lambda t: t.update({f"{Q}.scales": t[f"{Q}.scales"][:2].contiguous()}),
        f"has {Q}.scales of shape 2 x 128, not 4 x 128",
    ),
    "codes of another type": (
        GPTQ,
        gptq,
        lambda t: t.update({f"{Q}.qweight": t[f"{Q}.qweight"].float()}),
        f"has {Q}.qweight as float32, not int32",
    ),
    "act-order without its order": (
        GPTQ,
        gptq,
        lambda t: t.pop(f"{Q}.g_idx"),
        f"has no tensor {Q}.g_idx, which desc_act needs",
    ),
    "act-order that is denied": (
        {**GPTQ, "desc_act": False},
        gptq,
        lambda t: t.update({f"{Q}.g_idx": t[f"{Q}.g_idx"].flip(0)}),
        f"has {Q}.g_idx with its groups in another order, and desc_act is false",
    ),
    "group beyond the last": (
        GPTQ,
        gptq,
        lambda t: t[f"{Q}.g_idx"].fill_(7),
        f"has {Q}.g_idx with group 7, and 4 groups",
    ),
    "negative group": (
        GPTQ,
        gptq,
        lambda t: t[f"{Q}.g_idx"].fill_(-1),
        f"has {Q}.g_idx with group -1, and 4 groups",
    ),
    "codes for fewer outputs": (
        AWQ,
        awq,
        lambda t: t.update({f"{Q}.qweight": t[f"{Q}.qweight"][:, :8].contiguous()}),
        f"has {Q}.qzeros of shape 4 x 16, not 4 x 8",
    ),
    "shape that the codes do not have": (
        PACKED,
        ct_integers(4, 32, sym=True),
        lambda t: t[f"{Q}.weight_shape"].fill_(96),
        f"has {Q}.weight_packed of 128 x 16 words, which do not hold the 96 x 96 codes of 4 bits that",
    ),
    "act-order of packed groups without its order": (
        group_config(
            "pack-quantized",
            num_bits=4,
            type="int",
            symmetric=True,
            strategy="group",
            group_size=32,
            actorder="group",
        ),
        ct_integers(4, 32, sym=True),
        lambda t: None,
        "_proj.weight_g_idx, which actorder needs",
    ),
    "blocks of another size": (
        BLOCKS,
        fp8("block", "weight_scale_inv"),
        lambda t: t.update({f"{Q}.weight_scale_inv": torch.ones(2, 2)}),
        f"has {Q}.weight_scale_inv of shape 2 x 2, not 1 x 1",
    ),
    "fp8 without scales": (
        BLOCKS,
        fp8("block", "weight_scale_inv"),
        lambda t: t.pop(f"{Q}.weight_scale_inv"),
        f"has no tensor {Q}.weight_scale, which its quantised weight needs",
    ),
    "half of a quantised weight": (
        BNB,
        bnb("nf4", 64, nested=False),
        lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"][:100].contiguous()}),
        f"has {Q}.weight of 100 bytes, and its quant_state says 128 x 128 in blocks of 64",
    ),
    "state that is not JSON": (
        BNB,
        bnb("nf4", 64, nested=False),
        lambda t: t[f"{Q}.weight.quant_state.bitsandbytes__nf4"].fill_(65),
        f"has a {Q}.weight.quant_state.bitsandbytes__nf4 that is not JSON",
    ),
    "no inner scales": (
        BNB,
        bnb("nf4", 64, nested=True),
        lambda t: t.pop(f"{Q}.weight.nested_absmax"),
        f"has no tensor {Q}.weight.nested_absmax, which its quantised weight needs",
    ),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_do_not_fit(case: str, tmp_path: Path) -> None:
    config, pack, change, message = TENSORS[case]
    quantized_checkpoint(tmp_path / "m", config, pack, **ONE_LAYER)
    change_tensors(tmp_path / "m", change)
    with pytest.raises(CheckpointError, match=re.escape(message)) as caught:
        open_checkpoint(tmp_path / "m")
    assert "\n" not in str(caught.value)
    assert "it is damaged, or its quantization_config describes another checkpoint" in str(caught.value)


#: config, packer, part of the message.
CONFIGS: dict[str, tuple[Any, Pack, str]] = {
    "unknown method": (
        {"quant_method": "aqlm"},
        gptq,
        "is quantised with aqlm, which Pelton does not read (it reads gptq, awq, compressed-tensors, "
        "auto-round, fp8, fbgemm_fp8, modelopt, bitsandbytes and GGUF files); use the unquantised checkpoint",
    ),
    "no method": ({"bits": 4}, gptq, "is quantised with ?, which Pelton does not read"),
    "not an object": (["gptq"], gptq, "quantization_config is not an object"),
    "bits that are none": ({**GPTQ, "bits": 5}, gptq, "quantization_config: bits 5 is not 2 or 3 or 4 or 8"),
    "bits as text": ({**GPTQ, "bits": "4"}, gptq, "quantization_config: bits '4' is not a whole number"),
    "group size that divides nothing": (
        {**GPTQ, "group_size": 48},
        gptq,
        "group_size 48 is not -1 or a divisor of the ",
    ),
    "layout that is not read": (
        {**GPTQ, "checkpoint_format": "marlin"},
        gptq,
        "checkpoint_format 'marlin' is not supported (supported: gptq, gptq_v2)",
    ),
    "awq of three bits": ({**AWQ, "bits": 3}, awq, "bits 3 is not 4"),
    "awq in a layout of a kernel": (
        {**AWQ, "version": "marlin"},
        awq,
        "version 'marlin' is not supported (supported: gemm, gemv, gemv_fast)",
    ),
    "sparse": (
        {**PACKED, "format": "marlin-24"},
        ct_integers(4, 32, sym=True),
        "format 'marlin-24' is not supported (supported: pack-quantized, int-quantized, ",
    ),
    "rotated": (
        {**PACKED, "transform_config": {"config_groups": {"R1": {}}}},
        ct_integers(4, 32, sym=True),
        "transform_config 'with rotations of activations' is not supported",
    ),
    "threshold that is no number": (
        {**BNB, "llm_int8_threshold": "six"},
        bnb("nf4", 64, nested=False),
        "llm_int8_threshold 'six' is not a number of at least 0",
    ),
    "threshold below 0": (
        {**BNB, "llm_int8_threshold": -1.0},
        bnb("nf4", 64, nested=False),
        "llm_int8_threshold -1.0 is not a number of at least 0",
    ),
    "group size of nothing": ({**AWQ, "group_size": 0}, awq, "group_size 0 is not -1 or a divisor of the "),
    "pattern that is none": (
        {**PACKED, "ignore": ["re:("]},
        ct_integers(4, 32, sym=True),
        "ignore '(' is not a regular expression",
    ),
    "block size of one number": (
        {**BLOCKS, "weight_block_size": 128},
        fp8("block", "weight_scale_inv"),
        "weight_block_size 128 is not two sizes, of rows and columns",
    ),
    "algorithm of ModelOpt": (
        {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
        fp8("scalar"),
        "quant_algo 'W4A8_AWQ' is not supported (supported: fp8, nvfp4, ",
    ),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_configs_that_lie_or_are_not_supported(case: str, tmp_path: Path) -> None:
    config, pack, message = CONFIGS[case]
    quantized_checkpoint(tmp_path / "m", config, pack, **ONE_LAYER)
    with pytest.raises(CheckpointError, match=re.escape(message)) as caught:
        open_checkpoint(tmp_path / "m")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "pack"),
    [(GPTQ, awq), (AWQ, gptq), ({**GPTQ, "bits": 8}, gptq), (PACKED, gptq), (BNB, fp8("scalar"))],
)
def test_a_config_of_another_format_is_found_out(config: dict[str, Any], pack: Pack, tmp_path: Path) -> None:
    model = quantized_checkpoint(tmp_path / "m", config, pack, **ONE_LAYER)
    expected = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    with pytest.raises(CheckpointError):
        check_tensors(expected, open_checkpoint(tmp_path / "m"))


def test_scales_that_nothing_uses_are_named(tmp_path: Path) -> None:
    model = quantized_checkpoint(tmp_path / "m", GPTQ, gptq, **ONE_LAYER)
    change_tensors(tmp_path / "m", lambda t: t.update({"lm_head.scales": torch.ones(3)}))
    expected = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"1 tensor \(lm_head.scales\) unexpected"):
        check_tensors(expected, open_checkpoint(tmp_path / "m"))


def test_zero_biases_that_are_not_zero_are_unexpected(tmp_path: Path) -> None:
    model = quantized_checkpoint(tmp_path / "m", GPTQ, gptq, **ONE_LAYER)
    change_tensors(tmp_path / "m", lambda t: t.update({f"{Q}.bias": torch.ones(128)}))
    expected = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=rf"1 tensor \({Q}.bias\) unexpected"):
        check_tensors(expected, open_checkpoint(tmp_path / "m"))


def test_broken_scales_are_found_when_the_weight_is_read(tmp_path: Path) -> None:
    quantized_checkpoint(tmp_path / "m", GPTQ, gptq, **ONE_LAYER)
    change_tensors(tmp_path / "m", lambda t: t[f"{Q}.scales"][1].fill_(float("inf")))
    checkpoint = open_checkpoint(tmp_path / "m")
    with pytest.raises(CheckpointError, match=f"tensor {Q}.weight has 128 NaN or infinite block scales"):
        assert_finite(checkpoint.read(f"{Q}.weight"), f"{Q}.weight")


def test_a_scale_beyond_float16_is_refused(tmp_path: Path) -> None:
    quantized_checkpoint(tmp_path / "m", GPTQ, gptq, **ONE_LAYER)
    change_tensors(tmp_path / "m", lambda t: t.update({f"{Q}.scales": torch.full((4, 128), 1e6)}))
    with pytest.raises(CheckpointError, match="a 4-bit weight has a scale of 1e\\+06, beyond float16"):
        open_checkpoint(tmp_path / "m").read(f"{Q}.weight")


def test_kv_scales_of_some_layers_only(tmp_path: Path) -> None:
    config = group_config("float-quantized", num_bits=8, type="float", strategy="tensor")
    others = {"model.layers.1.self_attn.k_scale": torch.ones(1)}
    quantized_checkpoint(tmp_path / "m", config, fp8("scalar"), others=others)
    with pytest.raises(CheckpointError, match="has no k scale of layer 0's KV cache, and of other layers"):
        open_checkpoint(tmp_path / "m")


FORMATS: dict[str, tuple[dict[str, Any], Pack]] = {
    "gptq": (GPTQ, gptq),
    "awq": (AWQ, awq),
    "gemv": ({**AWQ, "version": "gemv"}, lambda w, name: packers.awq(w, group=32, version="gemv")),
    "gemv_fast": (
        {**AWQ, "version": "gemv_fast"},
        lambda w, name: packers.awq(w, group=32, version="gemv_fast"),
    ),
    "packed": (PACKED, ct_integers(4, 32, sym=True)),
    "blocks": (BLOCKS, fp8("block", "weight_scale_inv")),
    "bitsandbytes": (BNB, bnb("nf4", 64, nested=True)),
}


def damage(tensors: dict[str, torch.Tensor], rng: np.random.Generator) -> str:
    """Spoil one tensor of a quantised layer; says how."""
    names = sorted(name for name in tensors if "_proj" in name)
    name = names[rng.integers(len(names))]
    tensor = tensors.pop(name)
    kind = rng.integers(7)
    if kind == 0:
        return f"{name} dropped"
    if kind == 1:
        tensors[name + "x"] = tensor
    elif kind == 2:
        tensors[name] = tensor[: max(1, len(tensor) // 2)].contiguous() if tensor.dim() else tensor[None]
    elif kind == 3:
        tensors[name] = tensor.reshape(-1)
    elif kind == 4:
        tensors[name] = torch.zeros(tensor.shape, dtype=[torch.int32, torch.float32][rng.integers(2)])
    elif kind == 5:
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).clone()
        raw[rng.integers(len(raw), size=20)] = torch.tensor(rng.integers(0, 256, 20), dtype=torch.uint8)
        tensors[name] = raw.view(tensor.dtype).reshape(tensor.shape)
    else:
        tensors[name] = torch.cat([tensor, tensor]) if tensor.dim() else tensor.repeat(2)
    return f"{name} spoilt, kind {kind}"


@pytest.mark.parametrize("case", FORMATS)
def test_whatever_is_damaged_is_read_or_refused_in_a_sentence(case: str, tmp_path: Path) -> None:
    config, pack = FORMATS[case]
    model = quantized_checkpoint(tmp_path / "m", config, pack, **ONE_LAYER)
    expected = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    file = tmp_path / "m" / "model.safetensors"
    good = load_file(file)
    rng = np.random.default_rng(0)
    refused = []
    for _ in range(40):
        tensors = dict(good)
        what = damage(tensors, rng)
        save_file(tensors, file)
        try:
            checkpoint = open_checkpoint(tmp_path / "m")
            check_tensors(expected, checkpoint)
            for name in expected:
                assert_finite(checkpoint.read(name), name)
        except CheckpointError as error:
            refused.append(str(error))
        except Exception as error:
            raise AssertionError(what) from error
    assert len(refused) > 15
    assert not any("\n" in sentence for sentence in refused)


#: With every field that a reader asks for.
FULL: dict[str, tuple[dict[str, Any], Pack]] = {
    **{name: FORMATS[name] for name in ("awq", "packed", "blocks")},
    "gptq": ({**GPTQ, "checkpoint_format": "gptq", "pack_dtype": "int32", "dynamic": {"+:x": {}}}, gptq),
    "auto-round": (
        {**GPTQ, "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "extra_config": {}},
        gptq,
    ),
    "scalar": ({"quant_method": "fp8", "activation_scheme": "dynamic"}, fp8("scalar")),
    "modelopt": (
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
        fp8("scalar"),
    ),
    "bitsandbytes": ({**BNB, "load_in_4bit": True, "llm_int8_threshold": 6.0}, bnb("nf4", 64, nested=True)),
}
ODD = (None, -1, 5, 1.5, True, "x", [], {}, ["re:("], {"x": 1}, 10**30, float("nan"))


def fields(values: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each value within ``values``."""
    if path:
        yield path
    for key in values if isinstance(values, dict) else range(len(values)) if isinstance(values, list) else ():
        yield from fields(values[key], (*path, key))


@pytest.mark.parametrize("case", FULL)
def test_whatever_a_config_says_is_read_or_refused_in_a_sentence(case: str, tmp_path: Path) -> None:
    config, pack = FULL[case]
    model = quantized_checkpoint(tmp_path / "m", config, pack, **ONE_LAYER)
    expected = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    file = tmp_path / "m" / "config.json"
    good = json.loads(file.read_text())
    refused = []
    for path in fields(good["quantization_config"]):
        for odd in ODD:
            spoilt = copy.deepcopy(good)
            holder = spoilt["quantization_config"]
            for key in path[:-1]:
                holder = holder[key]
            holder[path[-1]] = odd
            file.write_text(json.dumps(spoilt))
            try:
                checkpoint = open_checkpoint(tmp_path / "m")
                check_tensors(expected, checkpoint)
                checkpoint.read(f"{Q}.weight")
            except CheckpointError as error:
                refused.append(str(error))
            except Exception as error:
                raise AssertionError((path, odd)) from error
    assert len(refused) > 5
    assert not any("\n" in sentence for sentence in refused)
