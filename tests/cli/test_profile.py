"""``pelton profile``: times by op and layer, bytes and operations of the plan, traces."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pelton.engine.artifact import open_engine
from pelton.engine.cost import StepShape, step_costs
from pelton.engine.layers import instruction_layers, layer_of_name, without_layer
from pelton.engine.profile import profile_session
from pelton.engine.session import Session
from pelton.errors import ConfigError
from pelton.kernels import native, roofline
from tests.cli.conftest import Run
from tests.cli.text_engine import LIMITS, MODEL

needs_library = pytest.mark.skipif(not native.available(), reason="the native library is not built")


@pytest.mark.parametrize(
    ("name", "layer", "alike"),
    [
        ("model.layers.3.mlp.up_proj.linear", 3, "model.layers.N.mlp.up_proj.linear"),
        ("transformer.h.11.attn.view.2", 11, "transformer.h.N.attn.view.2"),
        ("model.norm.rms_norm", None, "model.norm.rms_norm"),
        ("take_rows.1", None, "take_rows.1"),
        ("layers.0.linear", 0, "layers.N.linear"),
    ],
)
def test_names_know_their_layer(name: str, layer: int | None, alike: str) -> None:
    assert layer_of_name(name) == layer
    assert without_layer(name) == alike


def test_every_layer_has_its_instructions(text_engine: Path) -> None:
    plan = open_engine(text_engine).plan
    layers = instruction_layers(plan)
    assert {x for x in layers if x is not None} == {0, 1, 2, 3}
    inside = [x for x in layers if x is not None]
    assert inside == sorted(inside)


def test_costs_are_those_of_the_formulas(text_engine: Path) -> None:
    """Two sequences: 3 new tokens of 10, and 1 of 1."""
    plan = open_engine(text_engine).plan
    costs = step_costs(plan, StepShape(new=(3, 1), keys=(10, 1), logits=2))
    of = {i.name: (i, c) for i, c in zip(plan.instructions, costs, strict=True)}
    down, cost = of["model.layers.1.mlp.down_proj.linear"]
    assert cost.operations == 2 * 4 * 64 * 96
    assert cost.weights == plan.buffers[plan.operands[down.inputs[1]].buffer].nbytes >= 4 * 64 * 96
    assert cost.activations == 4 * 4 * (96 + 64)
    attention = next(c for i, c in of.values() if i.op == "paged_attention")
    assert attention.kv == 2 * (10 + 1) * 2 * 16 * 4
    assert attention.operations == 4 * (8 + 9 + 10 + 1) * 4 * 16
    writes = next(c for i, c in of.values() if i.op == "rope_kv_write")
    assert writes.kv == 2 * 4 * 2 * 16 * 4
    embedding = next(c for i, c in of.values() if i.op == "embedding")
    assert embedding.weights == 4 * 64 * 4
    head = costs[-1]
    assert head.operations == 2 * 2 * 64 * MODEL["vocab_size"]


def test_a_window_bounds_what_attention_reads(text_engine: Path) -> None:
    import msgspec

    plan = open_engine(text_engine).plan
    instructions = tuple(
        msgspec.structs.replace(i, attrs={**i.attrs, "window": 4}) if i.op == "paged_attention" else i
        for i in plan.instructions
    )
    windowed = msgspec.structs.replace(plan, instructions=instructions)
    costs = step_costs(windowed, StepShape(new=(3,), keys=(10,), logits=1))
    attention = next(c for i, c in zip(plan.instructions, costs, strict=True) if i.op == "paged_attention")
    assert attention.kv == 2 * (3 + 4 - 1) * 2 * 16 * 4
    assert attention.operations == 4 * (4 + 4 + 4) * 4 * 16


@needs_library
def test_the_machine_is_measured() -> None:
    rates = roofline.measure(1)
    assert 1e8 < rates.read < 1e12
    assert 1e8 < rates.float32 < 1e13
    assert 1e8 < rates.int8 < 1e14


@needs_library
def test_prefill_is_chunked_and_decode_goes_on(text_engine: Path) -> None:
    prompts = [np.arange(50, dtype=np.int32), np.arange(9, dtype=np.int32)]
    with Session(text_engine, kv_blocks=12) as session:
        steps = profile_session(session, prompts, 2)
        assert session.native_plan is not None
        assert [s.phase for s in steps] == ["prefill", "prefill", "decode", "decode"]
        assert steps[0].shape == StepShape(new=(40,), keys=(40,), logits=1)
        assert steps[1].shape == StepShape(new=(10, 9), keys=(50, 9), logits=2)
        assert steps[3].shape == StepShape(new=(1, 1), keys=(52, 11), logits=2)
        for step in steps:
            assert len(step.seconds) == len(session.engine.plan.instructions)
            assert 0 < step.seconds.sum() <= step.wall
        with pytest.raises(ConfigError, match=r"50 tokens and 15 steps are beyond the engine's 64"):
            profile_session(session, prompts, 15)
        with pytest.raises(ConfigError, match=r"1 to 4 sequences \(max_batch_size\), not 5"):
            profile_session(session, prompts[:1] * 5, 1)


@needs_library
def test_the_trace_is_one_of_chromes(pelton: Run, text_engine: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    result = pelton("profile", text_engine, "--prompt-len", 20, "--steps", 3, "--trace", trace)
    assert result.code == 0, result.err
    assert "trace of 4 steps" in result.err
    events = json.loads(trace.read_text())["traceEvents"]
    assert all({"name", "ph", "ts", "pid", "tid", "args"} <= e.keys() for e in events)
    timed = [e for e in events if e["ph"] == "X"]
    assert all(e["dur"] >= 0 for e in timed)
    plan = open_engine(text_engine).plan
    steps = [e for e in timed if e["tid"] == 1]
    assert [e["cat"] for e in steps] == ["prefill", "decode", "decode", "decode"]
    instructions = [e for e in timed if e["tid"] == 2 and e["name"] != "host"]
    assert len(instructions) == 4 * len(plan.instructions)
    assert instructions[0]["args"]["op"] == "embedding"
    assert instructions[0]["args"]["tactic"].startswith("cpu.")
    ends = {e["ts"] + e["dur"] for e in steps}
    assert max(e["ts"] + e["dur"] for e in instructions) <= max(ends) + 1e-3


@needs_library
def test_the_profile_adds_up(pelton: Run, text_engine: Path) -> None:
    record = json.loads(pelton("profile", text_engine, "--prompt", "Hello", "--batch-size", 2, "--json").out)
    prefill, decode = record["phases"]
    assert (prefill["tokens"], decode["tokens"]) == (2 * len("Hello"), 2)
    assert record["machine"]["threads"] == LIMITS["threads"]
    for phase in (prefill, decode):
        for part in ("ops", "layers", "instructions"):
            assert sum(row["share"] for row in phase[part]) == pytest.approx(1)
            for key in ("ms", "weight_bytes", "operations", "kv_bytes"):
                assert sum(row[key] for row in phase[part]) == pytest.approx(phase["total"][key])
        assert [row["layer"] for row in phase["layers"]] == [None, 0, 1, 2, 3]
    # Without a length, what the engine takes (64 tokens here).
    text = pelton("profile", text_engine, "--steps", 2).out
    assert "prefill of 62 tokens" in text
    assert "The machine reads " in text
    assert "decode, 1 sequences, median of 2 steps" in text
