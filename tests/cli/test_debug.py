"""``pelton debug``: any tensor without a rebuild, and the instruction where two runs part."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pelton.builder.eager_probe import EagerProbe
from pelton.engine.artifact import open_engine
from pelton.engine.debug import OwnErrors, SessionProbe, compare
from pelton.engine.pieces import Piece, make_batch
from pelton.engine.plan import Plan, TacticChoice
from pelton.engine.session import Session
from pelton.kernels import native
from tests.cli.conftest import Run
from tests.cli.text_engine import build_text_engine, edit_plan, spoil_weight, text_checkpoint

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library is not built")

DOWN = "model.layers.1.mlp.down_proj"


def copy(engine: Path, folder: Path, name: str = "copy.engine") -> Path:
    shutil.copytree(engine, folder / name)
    return folder / name


def debug(pelton: Run, engine: Path, *args: object) -> tuple[int, dict[str, Any]]:
    result = pelton("debug", engine, "--prompt", "Hello there", "--steps", 2, "--json", *args)
    assert result.err == ""
    return result.code, json.loads(result.out)


def test_a_good_engine_is_its_reference(pelton: Run, text_engine: Path) -> None:
    code, found = debug(pelton, text_engine, "--against", "reference")
    assert (code, found["first"], found["without_counterpart"]) == (0, None, [])
    plan = open_engine(text_engine).plan
    made = sum(len(i.outputs) for i in plan.instructions)
    assert found["compared"] == 3 * (made + 2 * 4), "prefill and two steps; the caches too"
    assert 0 < max(t["own"] for t in found["tensors"]) < 1e-5
    assert len(found["tokens"]) == len("Hello there") + 2


def test_a_wrong_tactic_is_named(
    pelton: Run, text_engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel of one instruction is another op's: all after it is wrong too, and it alone is named."""
    # Opening an engine refuses such a plan; here it stands for a kernel that computes something else.
    monkeypatch.setattr("pelton.engine.artifact.check_plan", lambda *checked: None)
    spoilt = copy(text_engine, tmp_path)
    norm = next(
        i.name for i in open_engine(spoilt).plan.instructions if i.op == "add_rms_norm" and ".1." in i.name
    )

    def edit(plan: Plan) -> Plan:
        wrong = (TacticChoice(max_tokens=40, tactic="cpu.rms_norm"),)
        instructions = tuple(
            msgspec.structs.replace(i, tactics=wrong) if i.name == norm else i for i in plan.instructions
        )
        return msgspec.structs.replace(plan, instructions=instructions)

    edit_plan(spoilt, edit)
    code, found = debug(pelton, spoilt, "--against", "reference")
    assert code == 1
    assert (found["first"]["tensor"], found["first"]["step"]) == (norm, 0)
    assert found["first"]["own"] > 0.1
    after = [
        t for t in found["tensors"] if t["step"] == 0 and t["instruction"] > found["first"]["instruction"]
    ]
    assert max(t["error"] for t in after) > 0.1
    assert not any(t["departs"] for t in after), "their own computation is right"
    text = pelton("debug", spoilt, "--against", "reference").out
    assert f"First to depart: {norm}\n" in text
    assert "add_rms_norm by cpu.rms_norm, prefill: its own error is" in text


def test_a_spoilt_weight_is_named_beside_the_good_engine(
    pelton: Run, text_engine: Path, tmp_path: Path
) -> None:
    spoilt = copy(text_engine, tmp_path)
    spoil_weight(spoilt, f"{DOWN}.weight")
    code, found = debug(pelton, spoilt, "--against", text_engine)
    assert code == 1
    assert found["first"]["tensor"] == f"{DOWN}.linear"
    assert found["first"]["error"] > 1
    assert found["first"]["inherited"] < 1e-6


def test_a_spoilt_weight_is_named_beside_its_checkpoint(text_engine: Path, tmp_path: Path) -> None:
    def first(engine: Path) -> str | None:
        session = Session(engine, kv_blocks=2)
        opened = session.engine
        other = EagerProbe(text_checkpoint(), opened.config, opened.plan, 2)
        tokens, blocks = np.arange(9, dtype=np.int32), np.array([1, 0], np.int32)
        batch = make_batch([Piece(tokens=tokens, start=0, blocks=blocks)], opened.config)
        probe = SessionProbe(session, "engine")
        found = compare(opened.plan, probe, other, [batch])
        probe.close()
        assert {e.name for e in found.errors} >= {f"{DOWN}.linear", "k_cache.2", "v_cache.0"}
        assert "model.layers.0.self_attn.qkv_proj.linear" in found.missing, "fused: the model has no such"
        return found.first.name if found.first else None

    assert first(text_engine) is None
    spoilt = copy(text_engine, tmp_path)
    spoil_weight(spoilt, f"{DOWN}.weight")
    assert first(spoilt) == f"{DOWN}.linear"


@pytest.mark.parametrize("passes", [{}, {"explicit_quantise": "off"}])
def test_rounding_to_int8_is_no_departure(passes: dict[str, str], tmp_path: Path) -> None:
    """Not beside the reference, nor beside the float32 model; rows quantised by an instruction or not."""
    checkpoint = text_checkpoint("q4_1", hidden_size=256, intermediate_size=512)
    engine = build_text_engine(tmp_path / "e.engine", checkpoint, passes=passes)
    tokens, blocks = np.arange(20, dtype=np.int32), np.array([1, 0, 2], np.int32)
    for other in ("reference", "eager"):
        session = Session(engine, kv_blocks=3)
        opened = session.engine
        packed = {b.name for b in opened.plan.buffers if b.kind == "arena" and b.dtype == "uint8"}
        assert bool(packed) == (not passes)
        batch = make_batch([Piece(tokens=tokens, start=0, blocks=blocks)], opened.config)
        left = SessionProbe(session, "engine")
        if other == "reference":
            right: Any = SessionProbe(Session(engine, kv_blocks=3, runner="reference"), "reference")
            found = compare(opened.plan, left, right, [batch], OwnErrors(session, session.num_blocks))
        else:
            right = EagerProbe(checkpoint, opened.config, opened.plan, 3)
            found = compare(opened.plan, left, right, [batch])
        assert found.first is None, found.first
        assert max(e.error for e in found.errors) > 1e-3
        assert not {e.name for e in found.errors} & packed
        left.close()
        right.close()


def test_engines_with_other_fusions_are_compared_by_name(
    pelton: Run, text_engine: Path, tmp_path: Path
) -> None:
    plain = build_text_engine(tmp_path / "plain.engine", passes={"fuse_qkv": "off"})
    code, found = debug(pelton, text_engine, "--against", plain)
    assert (code, found["first"]) == (0, None)
    assert f"{DOWN}.linear" in {t["tensor"] for t in found["tensors"]}
    assert len(found["without_counterpart"]) == 4
    assert found["only_in_other"] == 12


def test_engines_of_different_models_are_refused(pelton: Run, text_engine: Path, tmp_path: Path) -> None:
    other = build_text_engine(tmp_path / "other.engine", text_checkpoint(num_hidden_layers=1))
    result = pelton("debug", text_engine, "--against", other)
    assert result.code == 2
    assert "text.engine and other.engine are of different models: num_layers 4 and 1" in result.err


def test_any_tensor_can_be_shown_and_saved(pelton: Run, text_engine: Path, tmp_path: Path) -> None:
    listed = json.loads(pelton("debug", text_engine, "--list", "--json").out)
    view = next(t for t in listed if ".view" in t["name"])
    names = [view["name"], f"{DOWN}.linear"]
    args = [part for name in names for part in ("--tensor", name)]
    result = pelton("debug", text_engine, *args, "--prompt", "Hello", "--save", tmp_path / "t.npz", "--json")
    rows = {row["name"]: row for row in json.loads(result.out)}
    saved = np.load(tmp_path / "t.npz")
    assert set(saved) == set(rows) == set(names)
    assert rows[names[1]]["shape"] == list(saved[names[1]].shape) == [5, 64]
    assert rows[names[1]]["max"] == pytest.approx(float(saved[names[1]].max()))
    assert (
        "no tensor 'model.norm'; did you mean" in pelton("debug", text_engine, "--tensor", "model.norm").err
    )


@pytest.mark.parametrize("runner", ["native", "reference"])
def test_a_view_is_its_part_of_what_it_looks_at(text_engine: Path, runner: Any) -> None:
    plan = open_engine(text_engine).plan
    views = [o for o in plan.operands if o.name.startswith("model.layers.0.self_attn.view")]
    blocks = np.array([0, 1], np.int32)
    with Session(text_engine, kv_blocks=2, runner=runner) as session:
        batch = make_batch(
            [Piece(tokens=np.arange(5, dtype=np.int32), start=0, blocks=blocks)], session.config
        )
        whole = "model.layers.0.self_attn.qkv_proj.linear"
        result = session.run(batch, [whole, *(v.name for v in views)])
        parts = [v for v in views if plan.buffers[v.buffer].name == whole]
        assert len(parts) == 3
        for v in parts:
            width = int(np.prod([d for d in v.shape[1:] if isinstance(d, int)]))
            taken = result.outputs[v.name].reshape(5, width)
            np.testing.assert_array_equal(taken, result.outputs[whole][:, v.offset : v.offset + width])


@pytest.mark.parametrize("args", [[], ["--list", "--against", "reference"], ["--list", "--save", "x.npz"]])
def test_what_to_do_must_be_said(pelton: Run, text_engine: Path, args: list[str]) -> None:
    result = pelton("debug", text_engine, *args)
    assert result.code == 2
    assert result.err.startswith("pelton: ") and result.err.count("\n") == 1
