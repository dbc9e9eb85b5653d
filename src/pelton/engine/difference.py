"""What tells two engines of one model apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from pelton.engine.artifact import Engine
from pelton.engine.layers import without_layer
from pelton.engine.plan import Instruction, Plan
from pelton.engine.summary import summarise
from pelton.errors import ConfigError


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One difference: ``before`` or ``after`` is empty where only one engine has it."""

    what: str
    before: str
    after: str
    count: int = 1
    """How many places (equal ones of several layers) change alike."""


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """By section; a section without changes is empty."""

    settings: tuple[Change, ...]
    plan: tuple[Change, ...]
    tactics: tuple[Change, ...]
    weights: tuple[Change, ...]
    memory: tuple[Change, ...]
    passes: tuple[Change, ...]
    quality: tuple[Change, ...]
    files: tuple[Change, ...]

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not any(getattr(self, name) for name in self.__struct_fields__)


def difference(a: Engine, b: Engine) -> Difference:
    """What changes from ``a`` to ``b``. Raises ``ConfigError`` when they are of different models."""
    _check_one_model(a, b)
    left, right = a.config, b.config
    before, after = dict[str, Any](a.report()), dict[str, Any](b.report())
    return Difference(
        settings=_fields(msgspec.to_builtins(left.build), msgspec.to_builtins(right.build)),
        plan=_plan(a.plan, b.plan),
        tactics=_tactics(a.plan, b.plan),
        weights=_fields(_weight_types(a), _weight_types(b)),
        memory=_fields(msgspec.to_builtins(left.memory), msgspec.to_builtins(right.memory)),
        passes=_fields(_pass_facts(before), _pass_facts(after)),
        quality=_fields(quality_facts(before), quality_facts(after)),
        files=_fields(_hashes(a), _hashes(b)),
    )


def quality_facts(report: Mapping[str, Any]) -> dict[str, Any]:
    """What a build's report says of the engine's quality, figure by figure."""
    facts = dict(report.get("quality") or {})
    evaluation = facts.pop("evaluation", None) or {}
    facts |= {f"on text: {name}": value for name, value in evaluation.items()}
    for score in facts.pop("tasks", None) or ():
        facts[f"{score['task']}: {score['metric']}"] = _score(score)
    return {name: value for name, value in facts.items() if value not in (None, "")}


def _score(score: Mapping[str, Any]) -> str:
    """Of a task of lm-evaluation-harness."""
    value, stderr = score.get("value"), score.get("stderr")
    shown = "not a number" if value is None else f"{value:.4f}"
    error = "" if stderr is None else f" ± {stderr:.4f}"
    chat = ", chat template" if score.get("chat") else ""
    return f"{shown}{error} ({score['shots']} shots, {score['documents']} documents{chat})"


def _check_one_model(a: Engine, b: Engine) -> None:
    for field in ("architecture", "num_layers", "hidden_size", "vocab_size", "num_parameters"):
        mine, theirs = getattr(a.config.model, field), getattr(b.config.model, field)
        if mine != theirs:
            raise ConfigError(
                f"{a.path.name} and {b.path.name} are of different models ({a.config.model.name} and "
                f"{b.config.model.name}): {field} is {mine} and {theirs}"
            )


def _fields(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[Change, ...]:
    names = dict.fromkeys((*before, *after))
    return tuple(
        Change(what=name, before=_shown(before.get(name)), after=_shown(after.get(name)))
        for name in names
        if before.get(name) != after.get(name)
    )


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _plan(a: Plan, b: Plan) -> tuple[Change, ...]:
    """Instructions added, removed, and changed otherwise than in their tactics; alike layers as one."""
    left, right = ({i.name: (i, _signature(p, i)) for i in p.instructions} for p in (a, b))
    found: Counter[tuple[str, str, str]] = Counter()
    for name in dict.fromkeys((*left, *right)):
        before, after = left.get(name), right.get(name)
        if before is None or after is None or before[1] != after[1]:
            found[without_layer(name), before[1] if before else "", after[1] if after else ""] += 1
    return _counted(found)


def _signature(plan: Plan, instruction: Instruction) -> str:
    """The op with its operands' types, weights and attributes, as text."""
    parts = []
    for index in instruction.inputs:
        if index < 0:
            continue
        operand, buffer = plan.operands[index], plan.buffers[plan.operands[index].buffer]
        shape = ", ".join(map(str, operand.shape))
        kind = f"{buffer.quant} {buffer.layout}" if buffer.layout else buffer.dtype
        parts.append(f"{kind}[{shape}]")
    parts += [f"{name}={value}" for name, value in instruction.attrs.items()]
    return f"{instruction.op}({', '.join(parts)})"


def _tactics(a: Plan, b: Plan) -> tuple[Change, ...]:
    """Of instructions that both plans have."""
    left, right = ({i.name: _choices(i) for i in p.instructions} for p in (a, b))
    found: Counter[tuple[str, str, str]] = Counter()
    for name in left.keys() & right.keys():
        if left[name] != right[name]:
            found[without_layer(name), left[name], right[name]] += 1
    return _counted(Counter(dict(sorted(found.items()))))


def _choices(instruction: Instruction) -> str:
    if len(instruction.tactics) == 1:
        return instruction.tactics[0].tactic
    return ", ".join(f"{c.tactic} <= {c.max_tokens}" for c in instruction.tactics) or "reference"


def _counted(found: Mapping[tuple[str, str, str], int]) -> tuple[Change, ...]:
    return tuple(Change(what=w, before=b, after=a, count=n) for (w, b, a), n in found.items())


def _weight_types(engine: Engine) -> dict[str, str]:
    return {
        f"{w.quant} {w.layout}": f"{w.tensors} tensors, {w.nbytes:,} bytes" for w in summarise(engine).weights
    }


def _pass_facts(report: Mapping[str, Any]) -> dict[str, str]:
    rows: Iterable[Mapping[str, Any]] = report.get("passes") or ()
    return {
        p["name"]: f"changed {p['changed']} of {p['matched']}"
        + (f", {p['note']}" if p.get("note") else "")
        + "".join(f"; skipped {n}: {why}" for why, n in p.get("skipped", {}).items())
        for p in rows
    }


def _hashes(engine: Engine) -> dict[str, str]:
    """Of files whose difference nothing above shows: weights' values, tokenizer, compiled code."""
    told = ("plan.json", "config.json", "report.json")
    return {f.path: f.sha256[:12] for f in engine.manifest.files if f.path not in told}
