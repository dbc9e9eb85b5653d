"""Checkpoints as the field's tools make them, from the model to the saved folder: every weight is read.

Skipped without ``llmcompressor``, ``gptqmodel`` with ``optimum``, or ``bitsandbytes`` with ``accelerate``.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from pelton.ir.blocks import dequantize
from pelton.ir.evaluate import evaluate
from pelton.models.checkpoint import check_tensors, open_checkpoint
from tests.checkpoint.makers import tiny_hf_checkpoint
from tests.checkpoint.packers import SIZES

pytestmark = pytest.mark.slow
UP = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return tiny_hf_checkpoint("llama", tmp_path, **SIZES)


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """gptqmodel refuses machines of two cores."""
    monkeypatch.setattr(os, "cpu_count", lambda: 8)


def check(folder: Path, base: Path, weights: dict[str, Any], quant: str, rtol: float) -> None:
    """``weights``: what the tool says that some of them are; ``rtol``: of the largest value."""
    for file in base.glob("tokenizer*"):
        shutil.copy(file, folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    checkpoint = open_checkpoint(folder)
    assert check_tensors({n: tuple(t.shape) for n, t in model.state_dict().items()}, checkpoint) == []
    assert weights
    for name, values in weights.items():
        assert checkpoint.tensors[name].quant == quant
        found = dequantize(evaluate(checkpoint.source(name), checkpoint.read))
        np.testing.assert_allclose(found, values, rtol=0, atol=rtol * np.abs(values).max(), err_msg=name)


@pytest.mark.parametrize(
    ("scheme", "quant"),
    [
        ("W4A16", "int4_g128"),
        ("W4A16_ASYM", "int4_g128"),
        ("W8A16", "int8_g128"),
        ("W8A8", "int8_row"),
        ("FP8_DYNAMIC", "fp8_row"),
        ("FP8_BLOCK", "fp8_g128"),
        ("NVFP4A16", "nvfp4"),
        ("MXFP4A16", "mxfp4"),
    ],
)
def test_llm_compressor(scheme: str, quant: str, base: Path, tmp_path: Path) -> None:
    llmcompressor = pytest.importorskip("llmcompressor")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from safetensors.torch import load_file

    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    recipe = QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head"])
    llmcompressor.oneshot(model=model, recipe=recipe)
    folder = tmp_path / "out"
    model.save_pretrained(folder, save_compressed=True)
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    (group,) = config["config_groups"].values()
    stored, module = load_file(folder / "model.safetensors"), UP.removesuffix("weight")
    local = {name.removeprefix(module): value for name, value in stored.items() if name.startswith(module)}
    compressor = BaseCompressor.get_value_from_registry(group.get("format") or config["format"])
    values = compressor.decompress(local, QuantizationScheme(**group))["weight"].float().numpy()
    check(folder, base, {UP: values}, quant, rtol=2**-8)  # they multiply in bfloat16


@pytest.mark.parametrize(("bits", "act_order"), [(4, False), (4, True), (8, True)])
def test_gptqmodel(bits: int, act_order: bool, base: Path, cores: None, tmp_path: Path) -> None:
    gptqmodel = pytest.importorskip("gptqmodel")
    pytest.importorskip("optimum")
    config = gptqmodel.QuantizeConfig(bits=bits, group_size=32, desc_act=act_order, sym=True)
    model = gptqmodel.GPTQModel.load(str(base), config)
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(0, 250, (64,), generator=generator).tolist() for _ in range(16)]
    model.quantize([{"input_ids": text, "attention_mask": [1] * 64} for text in texts], batch_size=1)
    model.save(str(tmp_path / "out"))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    weights = {
        f"{name}.weight": module.dequantize_weight().float().T.numpy()
        for name, module in loaded.named_modules()
        if hasattr(module, "dequantize_weight")
    }
    check(tmp_path / "out", base, weights, f"int{bits}_g32", rtol=2**-10)  # in float16


@pytest.mark.parametrize("nested", [False, True])
def test_bitsandbytes_of_four_bits(nested: bool, base: Path, tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    pytest.importorskip("accelerate")
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=nested
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        base, quantization_config=config, dtype=torch.float32
    )
    weights = {
        f"{name}.weight": functional.dequantize_4bit(m.weight.data, m.weight.quant_state).numpy()
        for name, m in model.named_modules()
        if type(m).__name__ == "Linear4bit"
    }
    model.save_pretrained(tmp_path / "out")
    check(tmp_path / "out", base, weights, "nf4_g64", rtol=0)


def test_bitsandbytes_of_eight_bits(base: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("accelerate")
    config = transformers.BitsAndBytesConfig(load_in_8bit=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        base, quantization_config=config, dtype=torch.float16
    )
    weights = {
        f"{name}.weight": (m.weight.CB.float() * m.weight.SCB[:, None] / 127).numpy()
        for name, m in model.named_modules()
        if type(m).__name__ == "Linear8bitLt"
    }
    model.save_pretrained(tmp_path / "out")
    check(tmp_path / "out", base, weights, "int8_row", rtol=1e-6)


@pytest.mark.parametrize(("form", "symmetric"), [("auto_round", True), ("auto_round:auto_awq", False)])
def test_auto_round(form: str, symmetric: bool, base: Path, tmp_path: Path) -> None:
    """Rounded to nearest: on average a quarter of a step off, and a whole one if zero points were misread."""
    auto_round = pytest.importorskip("auto_round")
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    settings: dict[str, Any] = {"bits": 4, "group_size": 32, "iters": 0, "disable_opt_rtn": True}
    quantizer = auto_round.AutoRound(model, tokenizer, sym=symmetric, **settings)
    quantizer.quantize_and_save(str(tmp_path / "out"), format=form)
    folder = next((tmp_path / "out").rglob("config.json")).parent
    wanted = transformers.AutoModelForCausalLM.from_pretrained(base).state_dict()[UP].numpy()
    checkpoint = open_checkpoint(folder)
    assert checkpoint.tensors[UP].quant == "int4_g32"
    grouped = wanted.reshape(len(wanted), -1, 32)
    step = (grouped.max(-1) - grouped.min(-1)) / 15
    error = np.abs(dequantize(checkpoint.read(UP)).reshape(grouped.shape) - grouped).mean(-1)
    assert (error / step).mean() < 0.35
