"""Engines that round the inputs of products as checkpoints and recipes say, on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from pelton.builder.build import build
from pelton.builder.evaluation import exact_model
from pelton.builder.quantize import quantize
from pelton.engine.artifact import open_engine
from pelton.engine.config import BuildConfig
from pelton.engine.session import Session
from pelton.quant.recipes import RECIPES
from tests.builder.test_static_inputs import WIDE, clipping, one_sequence, relative
from tests.cli.text_engine import text_checkpoint

pytestmark = pytest.mark.gpu
CONFIG = BuildConfig(target="cuda", max_batch_size=4, max_num_tokens=128)


@pytest.mark.parametrize("recipe", ["fp8-static", pytest.param("smoothquant-static", marks=pytest.mark.slow)])
def test_static_scales_round_inputs_as_the_plan_says(recipe: str, tmp_path: Path) -> None:
    """The plan on PyTorch is the model whose inputs are rounded so (``test_static_inputs.py``)."""
    path = tmp_path / "static.engine"
    build(clipping(recipe, tmp_path / "state"), CONFIG, output=path, check=False)
    assert any("x_scale" in i.attrs for i in open_engine(path).plan.instructions)
    batch = one_sequence(open_engine(path).config, 40)
    with Session(path, kv_blocks=20) as gpu, Session(path, kv_blocks=20, runner="reference") as reference:
        got, want = (session.run(batch).logits_NV.copy() for session in (gpu, reference))
    assert relative(got, want) < 0.03


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fp8-block", "fp8"])
def test_inputs_are_rounded_as_a_recipe_says(recipe: str, tmp_path: Path) -> None:
    """Nearer to the model whose inputs are rounded so than to the one that has them as they are."""
    view, _ = quantize(text_checkpoint(**WIDE), RECIPES[recipe], tmp_path / "state")
    path = tmp_path / "x.engine"
    build(view, CONFIG, output=path, check=False)
    config = open_engine(path).config
    batch = one_sequence(config, 40)
    with Session(path, kv_blocks=20) as session:
        got = session.run(batch).logits_NV.copy()
    rounded, exact = (exact_model(view, config, round_inputs=on).run(batch) for on in (True, False))
    assert relative(got, rounded) < 0.5 * relative(got, exact)
