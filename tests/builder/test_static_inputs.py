"""What plans and reports say of quantised inputs: with static scales a plan is the model that rounds so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pelton.builder.build import build
from pelton.builder.evaluation import blocks_of, exact_model
from pelton.builder.quantize import quantize
from pelton.builder.quantized_view import round_in_stream
from pelton.builder.refit import refit
from pelton.engine.artifact import open_engine
from pelton.engine.batch import InputBatch
from pelton.engine.config import BuildConfig, EngineConfig
from pelton.engine.pieces import Piece, make_batch
from pelton.engine.session import Session
from pelton.errors import CheckpointError
from pelton.ir.activation_quant import ActivationQuant
from pelton.quant.config import Calibration
from pelton.quant.recipes import RECIPES, with_fields
from tests.builder.paper_gpu import build_paper_engine
from tests.cli.text_engine import text_checkpoint

#: Widths that kernels of codes take.
WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
}


def clipping(recipe: str, folder: Path) -> Any:
    """A quantised checkpoint with scales so small that clipping shows far beyond what bfloat16 does."""
    config = with_fields(RECIPES[recipe], calibration=Calibration(sequences=8, length=32))
    view, _ = quantize(text_checkpoint(**WIDE), config, folder)
    with_scales(view, 0.25)
    return view


def with_scales(view: Any, factor: float) -> None:
    """Let the checkpoint have other scales of inputs."""
    known = view.activation_quant

    def activation_quant(name: str) -> ActivationQuant | None:
        quant = known(name)
        return quant and msgspec.structs.replace(quant, scale=quant.scale * factor)

    view.activation_quant = activation_quant


def one_sequence(config: EngineConfig, count: int) -> InputBatch:
    """A step of so many tokens, the first of a sequence."""
    tokens, blocks = np.arange(count, dtype=np.int32) * 7 % 250, np.arange(blocks_of(config), dtype=np.int32)
    return make_batch([Piece(tokens=tokens, start=0, blocks=blocks)], config)


def relative(got: Any, want: Any) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@pytest.mark.parametrize("recipe", ["smoothquant-static", "fp8-static"])
def test_a_plan_rounds_inputs_as_the_checkpoint_says(recipe: str, tmp_path: Path) -> None:
    view = clipping(recipe, tmp_path / "state")
    path = build_paper_engine(tmp_path / "x.engine", view)
    plan, config = open_engine(path).plan, open_engine(path).config
    assert config.build.activations == RECIPES[recipe].activations.dtype  # type: ignore[union-attr]
    given = [i.attrs["x_scale"] for i in plan.instructions if "x_scale" in i.attrs]
    assert len(given) == 8, "four inputs in each of two layers"
    left = [i.op for i in plan.instructions if "y_scale" in i.attrs]
    # Of the last layer's attention rows are taken.
    assert left == ["rope_paged_attention", "norm_linear_gated", "norm_linear_gated"]
    batch = one_sequence(config, 40)
    with Session(path, kv_blocks=blocks_of(config), runner="reference") as session:
        got = session.run(batch).logits_NV.copy()
    rounded, exact = (
        exact_model(view, config, round_inputs=round_inputs).run(batch) for round_inputs in (True, False)
    )
    assert relative(exact, rounded) > 0.1
    assert relative(got, rounded) < 0.1 * relative(exact, rounded)


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ("fp8-block", "fp8 per 128 columns; here they are so in steps of more than 16 tokens"),
        ("fp8-tensor", "fp8 per tensor; here they are fp8 per token in steps of more than 16 tokens"),
        ("w8a8", "int8 per token; here they are so in steps of more than 16 tokens"),
        ("llm-int8", "int8 per token; here they are so, without exact columns, in steps of more than 16"),
    ],
)
def test_dynamic_scales_are_what_the_report_says(recipe: str, said: str, tmp_path: Path) -> None:
    view = round_in_stream(text_checkpoint(**WIDE), RECIPES[recipe])
    report = build(view, BuildConfig(target="sm_90"), output=tmp_path / "x.engine", dry_run=True)
    assert any(said in note for note in report.notes), report.notes


def test_an_engine_is_not_refitted_with_other_scales_of_inputs(tmp_path: Path) -> None:
    view = clipping("fp8-static", tmp_path / "state")
    path = build_paper_engine(tmp_path / "x.engine", view)
    assert refit(path, view).weights > 0
    with_scales(view, 2.0)
    with pytest.raises(CheckpointError, match=r"static scale .*rebuild"):
        refit(path, view)


def test_the_report_says_how_inputs_are_rounded(tmp_path: Path) -> None:
    view = clipping("fp8-static", tmp_path / "state")
    for settings, done in (
        ({}, "so in steps of more than 16 tokens, and exact in smaller ones, but for 3 that activation or"),
        (
            {"passes": {"quantise_results": "off"}},
            "so in steps of more than 16 tokens, and exact in smaller ones",
        ),
        ({"passes": {"static_inputs": "off"}}, "fp8 per token in steps of more than 16 tokens, and exact in"),
        ({"activations": "bfloat16", "dtype": "bfloat16"}, "bfloat16"),
        ({"deterministic": True}, "so in every step"),
    ):
        notes = build(
            view, BuildConfig(target="sm_90", **settings), output=tmp_path / "x.engine", dry_run=True
        ).notes
        said = "the checkpoint quantises the inputs of 14 products to fp8 per tensor with static scales; here"
        assert any(note.startswith(f"{said} they are {done}") for note in notes), notes
