"""The user's choice per pass: off, force, auto; and what the runner says and refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pelton.errors import ConfigError
from pelton.models.registry import create_model
from pelton.passes import PASSES, Pass, PassContext, PassReport, run_model_passes
from pelton.passes.run import model_text
from tests.models import zoo
from tests.models.oracle import hf_config_dict
from tests.passes.support import FLOAT32


def reports_of(make: Any = zoo.llama, passes: tuple[Pass, ...] = PASSES, **context: Any) -> dict[str, Any]:
    model = create_model(hf_config_dict(make()), max_seq_len=64)
    return {r.name: r for r in run_model_passes(passes, model, replace(FLOAT32, **context))}


def test_names_are_unique_and_needs_stand_earlier() -> None:
    names = [p.name for p in PASSES]
    assert len(set(names)) == len(names)
    for i, p in enumerate(PASSES):
        assert set(p.needs) <= set(names[:i]), p.name
        assert not p.undoes or p.undoes in names
        assert p.rewrite
        assert p.bound


def test_model_passes_come_before_graph_passes() -> None:
    assert [p.kind for p in PASSES] == sorted((p.kind for p in PASSES), reverse=True)


def test_a_pass_that_is_off_does_nothing_and_says_so() -> None:
    off = reports_of(modes={"fuse_qkv": "off"})["fuse_qkv"]
    assert (off.matched, off.changed, off.note) == (0, 0, "switched off")
    assert reports_of()["fuse_qkv"].changed == 3


def test_forcing_a_pass_that_is_refused_a_place_fails_with_the_reason() -> None:
    with pytest.raises(ConfigError, match=r"fuse_qkv=force: model\.layers\.0\.self_attn: qkv_proj is packed"):
        reports_of(zoo.phi3, modes={"fuse_qkv": "force"})


def test_forcing_a_pass_that_finds_nothing_fails() -> None:
    with pytest.raises(ConfigError, match="fuse_gate_mlp=force: nothing in this model fits"):
        reports_of(zoo.gpt2, modes={"fuse_gate_mlp": "force"})


def test_a_fast_build_leaves_out_what_is_not_marked_fast_unless_forced() -> None:
    ran: list[str] = []

    def run(model: Any, context: PassContext) -> PassReport:
        ran.append("slow")
        return PassReport(name="slow", matched=1, changed=1)

    slow = Pass(name="slow", kind="model", run=run, rewrite="", bound="", fast=False)
    assert reports_of(passes=(slow,), fast=True)["slow"].note == "not part of a fast build"
    assert ran == []
    reports_of(passes=(slow,), fast=True, modes={"slow": "force"})
    assert ran == ["slow"]


def test_what_undoes_a_pass_switches_it_off_when_forced() -> None:
    def run(model: Any, context: PassContext) -> PassReport:
        return PassReport(name="undo", matched=1, changed=1)

    undo = Pass(name="undo", kind="model", run=run, rewrite="", bound="", undoes="fuse_qkv", default=False)
    passes = (*(p for p in PASSES if p.kind == "model"), undo)
    assert reports_of(passes=passes)["undo"].note == "runs only when forced"
    assert reports_of(passes=passes, modes={"undo": "force"})["fuse_qkv"].note == "undo is forced"


def test_the_change_of_a_model_pass_is_kept_and_explained() -> None:
    model = create_model(hf_config_dict(zoo.llama(num_hidden_layers=1)), max_seq_len=64)
    before, texts = model_text(model), []
    reports = run_model_passes(PASSES, model, FLOAT32, explain=texts.append)
    qkv = next(r for r in reports if r.name == "fuse_qkv")
    assert texts[[t.split("\n")[0] for t in texts].index("fuse_qkv")] == f"fuse_qkv\n{qkv.diff}"
    attn = "model.layers.0.self_attn"
    assert f"-{attn}.q_proj.weight [32, 32] = {attn}.q_proj.weight" in qkv.diff
    parts = ", ".join(f"{attn}.{p}_proj.weight" for p in "qkv")
    assert f"+{attn}.qkv_proj.weight [64, 32] = Concat({parts})" in qkv.diff
    assert model_text(model) != before
