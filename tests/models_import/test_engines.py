"""Engines of imported models against ``transformers``: packed, paged, chunked, step by step."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import pelton
from tests.e2e.test_architectures import EXACT, SMALL, check_against
from tests.models_import.families import FAMILIES, OWN, make_model, write_checkpoint
from tests.models_import.table import PAGE

#: One of each way to spell a norm, a rotation, an MLP; the others run in `make test-all`.
ALWAYS = (
    "cohere",
    "cohere2",
    "exaone4",
    "glm4",
    "gpt_neox",
    "gptj",
    "granite",
    "granite_swa",
    "nemotron",
    "olmo",
    "opt",
    "phi",
)


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=[] if f in ALWAYS else [pytest.mark.slow]) for f in FAMILIES]
)
def test_an_engine_of_a_family_without_a_file_computes_what_transformers_computes(
    family: str, tmp_path: Path
) -> None:
    model = make_model(family)
    checkpoint = write_checkpoint(model, tmp_path / family)
    report = pelton.build(checkpoint, pelton.BuildConfig(**EXACT, **SMALL), output=tmp_path / "x.engine")
    assert report.quality is not None
    assert report.quality.runner == "native"
    assert all(tactic.tactic for tactic in report.tactics)
    assert any("is imported from transformers" in note for note in report.notes)
    check_against(model, tmp_path / "x.engine", 1e-4)


def test_an_engine_that_turns_two_values_of_a_head_of_eight(tmp_path: Path) -> None:
    model = make_model("gpt_neox", hidden_size=32)
    checkpoint = write_checkpoint(model, tmp_path / "gpt_neox")
    pelton.build(checkpoint, pelton.BuildConfig(**EXACT, **SMALL), output=tmp_path / "x.engine")
    check_against(model, tmp_path / "x.engine", 1e-4)


def test_the_page_lists_every_family() -> None:
    listed = re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE)
    assert listed == list(FAMILIES)


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=[] if f == "gemma3_text" else [pytest.mark.slow]) for f in OWN]
)
def test_models_with_a_file_can_be_imported_too(family: str, tmp_path: Path) -> None:
    model = make_model(family)
    checkpoint = write_checkpoint(model, tmp_path / family)
    config = pelton.BuildConfig(**EXACT, **SMALL, model_impl="transformers")
    pelton.build(checkpoint, config, output=tmp_path / "x.engine")
    check_against(model, tmp_path / "x.engine", 1e-4)
