"""NVFP4 weights that engines stack share the scale of the tensor, however they were rounded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import pelton
from pelton.builder.quantized_view import round_in_stream
from pelton.ir.group_blocks import parts
from pelton.ir.tensors import HostTensor
from pelton.models.checkpoint import open_checkpoint
from pelton.quant.config import Calibration
from pelton.quant.nvfp4 import headers, stack_of
from pelton.quant.recipes import RECIPES, with_fields
from tests.checkpoint.makers import tiny_hf_checkpoint, tiny_model
from tests.checkpoint.packers import SIZES


def scale(tensor: HostTensor) -> float:
    _, _, header = parts(tensor)
    assert header is not None and (header == header[0]).all()
    return float(header[0, 0])


@pytest.mark.parametrize("recipe", ["nvfp4", "gptq-nvfp4"])
def test_stacked_projections_share_the_largest_scale(recipe: str, tmp_path: Path) -> None:
    model = tiny_model("llama", **{**SIZES, "num_hidden_layers": 1})
    for name, parameter in model.named_parameters():
        if name.endswith(("k_proj.weight", "up_proj.weight")):
            parameter.data.mul_(3)
    base = open_checkpoint(tiny_hf_checkpoint("llama", tmp_path, model=model))
    config = with_fields(RECIPES[recipe], calibration=Calibration(sequences=1, length=32))
    pelton.quantize(base, config, tmp_path / "out")
    written = open_checkpoint(tmp_path / "out")
    views = [written] if config.calibrated else [written, round_in_stream(base, config)]
    layer = "model.layers.0."
    for view in views:
        q, k, v, o = (scale(view.read(f"{layer}self_attn.{name}_proj.weight")) for name in "qkvo")
        gate, up, down = (
            scale(view.read(f"{layer}mlp.{name}_proj.weight")) for name in ("gate", "up", "down")
        )
        largest = np.abs(base.read(f"{layer}self_attn.k_proj.weight").data).max()
        assert q == k == v == pytest.approx(float(largest) / (6 * 448), rel=1e-6)
        assert gate == up
        assert len({q, o, gate, down}) == 4


def test_modules_that_engines_stack() -> None:
    ones = np.ones((2, 16), np.float32)
    found = headers({"a.q_proj": ones, "a.k_proj": 2 * ones, "b.q_proj": 3 * ones, "a.o_proj": 4 * ones})
    assert {name: float(row[0, 0]) * 6 * 448 for name, row in found.items()} == pytest.approx(
        {"a.q_proj": 2, "a.k_proj": 2, "b.q_proj": 3, "a.o_proj": 4}
    )
    assert stack_of("a.gate_proj") == stack_of("a.up_proj") != stack_of("b.up_proj")
    assert stack_of("lm_head") == "lm_head"
