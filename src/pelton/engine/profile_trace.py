"""A profile as a trace of Chrome's format: for ui.perfetto.dev, chrome://tracing and the like.

One track of steps, and one of the instructions in them. What the host spends around a step is shown after
its instructions, though part of it comes before.
Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pelton.engine.layers import instruction_layers
from pelton.engine.plan import Instruction, Plan, row_dim
from pelton.engine.profile import StepProfile

_STEPS, _INSTRUCTIONS = 1, 2


def chrome_trace(plan: Plan, steps: Sequence[StepProfile], title: str) -> dict[str, Any]:
    """The trace as a JSON object; times in microseconds, steps one after another."""
    events: list[dict[str, Any]] = [
        _meta("process_name", 0, title),
        _meta("thread_name", _STEPS, "steps"),
        _meta("thread_name", _INSTRUCTIONS, "instructions"),
    ]
    layers = instruction_layers(plan)
    begin = 0.0
    for number, step in enumerate(steps):
        tokens = sum(step.shape.new)
        tactics = tactics_of(plan, tokens, step.shape.logits)
        what = f"{step.phase}, {tokens} tokens of {len(step.shape.new)} sequences"
        args: dict[str, Any] = {"step": number, "tokens": tokens, "without_profiling_ms": step.plain * 1e3}
        events.append(_event(what, step.phase, _STEPS, begin, step.wall, args))
        at = begin
        for instruction, tactic, layer, seconds, cost in zip(
            plan.instructions, tactics, layers, step.seconds, step.costs, strict=True
        ):
            args = {
                "op": instruction.op,
                "tactic": tactic,
                "layer": layer,
                "weight_bytes": cost.weights,
                "kv_bytes": cost.kv,
                "activation_bytes": cost.activations,
                "operations": cost.operations,
            }
            events.append(_event(instruction.name, instruction.op, _INSTRUCTIONS, at, float(seconds), args))
            at += float(seconds)
        if at < begin + step.wall:
            events.append(_event("host", "host", _INSTRUCTIONS, at, begin + step.wall - at, {}))
        begin = max(begin + step.wall, at)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def tactics_of(plan: Plan, tokens: int, logits: int) -> list[str]:
    """The tactic of each instruction in a step of ``tokens`` tokens and ``logits`` rows of logits."""
    found = []
    for instruction in plan.instructions:
        on_gpu = any(choice.tactic.startswith("cuda.") for choice in instruction.tactics)
        by_logits = on_gpu and row_dim(plan, instruction) == "N"
        found.append(tactic_of(instruction, logits if by_logits else tokens))
    return found


def tactic_of(instruction: Instruction, tokens: int) -> str:
    """The tactic that runs ``instruction`` in a step of ``tokens`` tokens."""
    for choice in instruction.tactics:
        if tokens <= choice.max_tokens:
            return choice.tactic
    return "reference"


def _event(
    name: str, category: str, track: int, start: float, seconds: float, args: dict[str, Any]
) -> dict[str, Any]:
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "ts": round(start * 1e6, 3),
        "dur": round(seconds * 1e6, 3),
        "pid": 1,
        "tid": track,
        "args": args,
    }


def _meta(name: str, track: int, value: str) -> dict[str, Any]:
    return {"name": name, "ph": "M", "ts": 0, "pid": 1, "tid": track, "args": {"name": value}}
