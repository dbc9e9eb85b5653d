"""Launches of a GPU engine that were edited are refused, or stay within the session's own memory."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest

from pelton.engine.artifact import Engine, open_engine
from pelton.engine.cuda.code import STEP_KERNELS, Code, Launch, Matmul
from pelton.engine.cuda.code_check import check_code
from pelton.engine.plan import Plan
from pelton.engine.plan_check import check_plan, dim_values
from pelton.engine.session import Session
from pelton.errors import EngineError
from pelton.kernels.gpu.null import null_gpu
from pelton.kernels.launch import COUNTER_BYTES
from tests.builder.paper_gpu import build_paper_engine

SHARED = 232448
MUTATIONS = 1500


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return open_engine(build_paper_engine(tmp_path_factory.mktemp("gpu") / "paper.engine"))


@pytest.fixture(scope="module")
def stored(engine: Engine) -> Any:
    return json.loads((engine.path / "compiled" / "code.json").read_bytes())


def first(code: Any, tag: str) -> Any:
    """The first launch of a kind, and what it does with addresses."""
    for by_tactic in code["launches"]:
        for variants in by_tactic.values():
            for work in variants["any"]:
                if work["type"] == tag:
                    return work
    raise AssertionError(f"no {tag}")


def argument(code: Any, kind: str) -> Any:
    for by_tactic in code["launches"]:
        for variants in by_tactic.values():
            for work in (*variants["any"], *(variants.get("decode") or ())):
                for one in work.get("arguments", ()):
                    if one["kind"] == kind:
                        return one
    raise AssertionError(f"no argument {kind}")


def edit(path: Callable[[Any], Any], **fields: Any) -> Callable[[Any], None]:
    return lambda code: path(code).update(fields)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda code: code["launches"].pop(), "have launches of"),
        (lambda code: code["launches"][0].clear(), "has no launches of its tactic"),
        (edit(lambda c: c, step_kernels=dict.fromkeys(STEP_KERNELS, 1000)), "no kernel 1000"),
        (edit(lambda c: c, step_kernels={}), "no kernel for bias"),
        (edit(lambda c: c["kernels"][0], file="../other.cubin"), "no file of the engine's code"),
        (edit(lambda c: c["kernels"][0], threads=2048), "has 2048 threads"),
        (edit(lambda c: c["kernels"][0], shared=1 << 20), "bytes of shared memory"),
        (edit(lambda c: c["kernels"][0], scratch=1 << 20), "parameters of its own"),
        (edit(lambda c: first(c, "kernel"), kernel=-1), "no kernel -1"),
        (edit(lambda c: first(c, "kernel"), grid=[]), "a grid of 0 axes"),
        (edit(lambda c: first(c, "kernel"), grid=[[{"times": 1 << 40}]]), "a grid beyond"),
        (edit(lambda c: first(c, "kernel"), grid=[[{"dim": "Q"}]]), "unknown dimension Q"),
        (edit(lambda c: first(c, "kernel"), grid=[[{"dim": "T", "div": 0}]]), "for each 0"),
        (edit(lambda c: first(c, "kernel"), footprint=1 << 30), "footprint"),
        (edit(lambda c: argument(c, "input"), index=9), "no input 9"),
        (edit(lambda c: argument(c, "output"), index=-1), "no output -1"),
        (edit(lambda c: argument(c, "workspace"), offset=1 << 40), "into the workspace"),
        (edit(lambda c: argument(c, "workspace"), offset=8), "8 bytes into the workspace"),
        (edit(lambda c: argument(c, "dim"), dim="Q"), "unknown dimension Q"),
        (edit(lambda c: argument(c, "float"), value=1e999), "the number inf"),
        (edit(lambda c: first(c, "matmul"), n=1 << 20), "reaches beyond its"),
        (edit(lambda c: first(c, "matmul"), x_row=1 << 20), "reaches beyond its"),
        (edit(lambda c: first(c, "matmul"), dtype="int32"), "a product of int32"),
        (edit(lambda c: first(c, "matmul"), dtype="float8_e4m3fn"), "with 0 vectors of scales"),
        (edit(lambda c: first(c, "matmul")["weight"], offset=1 << 40), "into input 1"),
        (edit(lambda c: first(c, "matmul")["weight"], offset=16), "reaches beyond its input 1"),
        (edit(lambda c: argument(c, "input"), offset=-16), "an address -16 bytes into input"),
    ],
)
def test_what_was_edited_is_said(
    engine: Engine, stored: Any, change: Callable[[Any], None], why: str
) -> None:
    code = copy.deepcopy(stored)
    change(code)
    with pytest.raises(ValueError, match=why):
        check_code(msgspec.convert(code, Code), engine.plan, SHARED)


def test_what_was_built_passes(engine: Engine, stored: Any) -> None:
    check_code(msgspec.convert(stored, Code), engine.plan, SHARED)


def test_edited_files_are_refused_when_a_session_opens(tmp_path: Path) -> None:
    path = build_paper_engine(tmp_path / "paper.engine")
    with null_gpu():
        with Session(path, kv_blocks=8):
            pass
        cubin = next((path / "compiled").glob("*.cubin"))
        whole = cubin.read_bytes()
        cubin.write_bytes(whole[:-1] + b"!")
        with pytest.raises(EngineError, match=r"cubin does not have the SHA-256 its manifest says"):
            Session(path, kv_blocks=8)
        cubin.write_bytes(whole)
        code = path / "compiled" / "code.json"
        code.write_bytes(code.read_bytes().replace(b'"scratch":2', b'"scratch":3', 1))
        with pytest.raises(EngineError, match=r"code\.json does not have the SHA-256"):
            Session(path, kv_blocks=8)


def test_kernels_that_take_other_arguments_are_refused_when_a_session_opens(tmp_path: Path) -> None:
    """Built by a Pelton whose kernels of sampling took theirs in another order."""
    with mock.patch("pelton.builder.cubins.interface", return_value="another"):
        path = build_paper_engine(tmp_path / "paper.engine")
    with (
        null_gpu(),
        pytest.raises(EngineError, match=r"kernels .* take other arguments than .*; rebuild the engine$"),
    ):
        Session(path, kv_blocks=8)


def places_of(value: Any) -> list[tuple[Any, Any]]:
    """Every number and word below ``value``: what holds it, and its key there."""
    found: list[tuple[Any, Any]] = []
    for key, below in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(below, dict | list):
            found += places_of(below)
        elif key not in ("file", "name"):
            found.append((value, key))
    return found


def test_any_edit_is_refused_or_stays_within_memory(engine: Engine, stored: Any) -> None:
    """One number or word at a time, somewhere in the file."""
    rng = random.Random(0)
    words = ["T", "B", "N", "B+1", "input", "output", "workspace", "dim", "int", "float", "bfloat16", "x"]
    numbers = [-1, 0, 1, 2, 15, 16, 1 << 16, 1 << 31, 1 << 40, -(1 << 20)]
    edited = copy.deepcopy(stored)
    places = places_of(edited)
    refused = 0
    for _ in range(MUTATIONS):
        node, key = rng.choice(places)
        old = node[key]
        node[key] = rng.choice(words if isinstance(old, str) else numbers)
        try:
            code = msgspec.convert(edited, Code)
            check_code(code, engine.plan, SHARED)
        except (ValueError, msgspec.ValidationError):
            refused += 1
        else:
            assert_within(code, engine.plan)
        node[key] = old
    assert edited == stored
    assert refused > MUTATIONS // 4


def assert_within(code: Code, plan: Plan) -> None:
    """As the launcher would resolve it: every operand, kernel and address is there."""
    dims = dim_values(plan.dims)
    for instruction, by_tactic in zip(plan.instructions, code.launches, strict=True):
        for choice in instruction.tactics:
            for work in (*by_tactic[choice.tactic].any, *(by_tactic[choice.tactic].decode or ())):
                if isinstance(work, Matmul):
                    continue
                assert isinstance(work, Launch)
                assert code.kernels[work.kernel].threads <= 1024
                assert 0 < sum(t.value(dims) for t in work.grid[0]) < 1 << 31
                for one in work.arguments:
                    if one.kind == "workspace":
                        assert 0 <= one.offset <= COUNTER_BYTES + plan.workspace_bytes
                    if one.kind in ("input", "output"):
                        operands = instruction.inputs if one.kind == "input" else instruction.outputs
                        assert one.index >= 0 and operands[one.index] >= 0


def test_a_plan_for_a_gpu_is_held_to_its_memory(engine: Engine) -> None:
    stored = json.loads(msgspec.json.encode(engine.plan))

    def refused(change: Callable[[Any], None], why: str) -> None:
        plan = copy.deepcopy(stored)
        change(plan)
        with pytest.raises(ValueError, match=why):
            check_plan(msgspec.convert(plan, Plan), engine.config, engine.weights.meta)

    def buffer(plan: Any, kind: str) -> Any:
        return next(b for b in plan["buffers"] if b["kind"] == kind)

    def operand_of(plan: Any, kind: str) -> Any:
        return next(o for o in plan["operands"] if plan["buffers"][o["buffer"]]["kind"] == kind)

    refused(lambda p: buffer(p, "weight").update(shape=[1 << 20, 64]), "stored otherwise")
    refused(lambda p: buffer(p, "input").update(shape=["T", 9]), "no input of a step")
    refused(lambda p: buffer(p, "k_cache").update(dtype="float32"), "no cache of KV group")
    refused(lambda p: operand_of(p, "k_cache").update(offset=1 << 30), "not the whole of")
    refused(lambda p: operand_of(p, "weight").update(offset=1 << 30), "beyond its buffer|not the whole")
    refused(lambda p: operand_of(p, "arena").update(offset=1 << 30), "beyond its buffer")
    refused(lambda p: p["instructions"][0].update(tactics=[]), "has no tactic")
    refused(lambda p: p["instructions"][0]["tactics"][-1].update(max_tokens=1), "do not cover")
