"""Engines that round the inputs of products with a checkpoint's static scales, on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from pelton.builder.build import build
from pelton.builder.evaluation import exact_model
from pelton.engine.artifact import open_engine
from pelton.engine.config import BuildConfig
from pelton.engine.session import Session
from tests.builder.test_static_inputs import clipping, one_sequence, relative

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("recipe", ["fp8-static", pytest.param("smoothquant-static", marks=pytest.mark.slow)])
def test_static_scales_round_inputs_as_the_plan_says(recipe: str, tmp_path: Path) -> None:
    """The plan on PyTorch is the model whose inputs are rounded so (``test_static_inputs.py``).

    Scales clip, which shows ten times as much as what bfloat16 does: its last bit decides between two codes
    of fp8 often enough that the plan on PyTorch is 6 % from the same model in float32.
    """
    view, path = clipping(recipe, tmp_path / "state"), tmp_path / "static.engine"
    build(view, BuildConfig(target="cuda", max_batch_size=4, max_num_tokens=128), output=path, check=False)
    assert any("x_scale" in i.attrs for i in open_engine(path).plan.instructions)
    config = open_engine(path).config
    batch = one_sequence(config, 40)
    with Session(path, kv_blocks=20) as gpu, Session(path, kv_blocks=20, runner="reference") as reference:
        got, want = (session.run(batch).logits_NV.copy() for session in (gpu, reference))
    rounded, exact = (exact_model(view, config, round_inputs=on).run(batch) for on in (True, False))
    assert relative(got, want) < 0.1 * relative(exact, rounded)
