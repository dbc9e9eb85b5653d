"""What an engine is, worked out from its files alone: what ``inspect``, ``diff`` and the page show."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from pelton.engine.artifact import Engine
from pelton.engine.layers import instruction_layers, without_layer
from pelton.engine.plan import Buffer, Instruction, Operand, Plan, producers


class OpRow(msgspec.Struct, frozen=True, kw_only=True):
    """A tactic's share of the plan."""

    op: str
    tactic: str
    """``reference`` where the instruction has no tactic."""
    max_tokens: int
    """The bucket: steps of at most so many tokens; 0: every step."""
    instructions: int
    weight_bytes: int
    """Of these instructions' weights; a weight that several use counts for each."""


class WeightRow(msgspec.Struct, frozen=True, kw_only=True):
    """Weights of one type in one layout."""

    quant: str
    layout: str
    tensors: int
    values: int
    nbytes: int


class InstructionRow(msgspec.Struct, frozen=True, kw_only=True):
    """One instruction of a block; names without the layer's number where there are several layers."""

    name: str
    op: str
    tactics: tuple[str, ...]
    """As ``tactic`` or ``tactic <= 64``, by bucket."""
    inputs: tuple[str, ...]
    """Activations as ``float32[T, 576]``, in order."""
    weights: tuple[str, ...]
    """Weights as ``q4_1 x16 [960, 576]``."""
    outputs: tuple[str, ...]


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive instructions: outside the layers, or those of a run of layers that are alike."""

    label: str
    layers: int
    """How many layers are alike; 0: outside."""
    first: int
    """Index of the first instruction."""
    instructions: tuple[InstructionRow, ...]
    """Of one layer."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """See ``summarise``."""

    ops: tuple[OpRow, ...]
    weights: tuple[WeightRow, ...]
    blocks: tuple[Block, ...]
    arena: tuple[int, ...]
    """Bytes of intermediate tensors alive at each instruction of the largest step."""


def summarise(engine: Engine) -> Summary:
    """The tables of ``engine``; reads no weights."""
    plan = engine.plan
    return Summary(
        ops=tuple(_ops(plan)),
        weights=tuple(_weights(engine)),
        blocks=tuple(_blocks(plan)),
        arena=tuple(live_bytes(plan)),
    )


def settings(engine: Engine) -> dict[str, str]:
    """What the engine was built for, by the setting's name, as people read it."""
    return {name: _setting(name, v) for name, v in msgspec.to_builtins(engine.config.build).items()}


def _setting(name: str, value: Any) -> str:
    if name == "profiles":
        ranges = ({dim: f"{r['min']}:{r['opt']}:{r['max']}" for dim, r in p["dims"].items()} for p in value)
        return "; ".join(", ".join(f"{dim} {text}" for dim, text in p.items()) for p in ranges)
    if isinstance(value, dict):
        return ", ".join(f"{k} {v}" for k, v in value.items()) or "none"
    return "all cores" if name == "threads" and value == 0 else str(value)


def lifetimes(plan: Plan) -> dict[int, tuple[int, int]]:
    """Of each arena buffer by index: the instruction that makes it, and the last one that reads it (or a
    view of it)."""
    first = producers(plan)
    last = dict(first)
    for index, instruction in enumerate(plan.instructions):
        for operand in (*instruction.inputs, *instruction.outputs):
            if operand >= 0 and plan.operands[operand].buffer in last:
                last[plan.operands[operand].buffer] = index
    last[plan.operands[plan.logits].buffer] = len(plan.instructions) - 1
    return {buffer: (begin, last[buffer]) for buffer, begin in first.items()}


def live_bytes(plan: Plan) -> list[int]:
    """Bytes of arena tensors alive at each instruction, at the largest step."""
    change = [0] * (len(plan.instructions) + 1)
    for buffer, (begin, end) in lifetimes(plan).items():
        change[begin] += plan.buffers[buffer].nbytes
        change[end + 1] -= plan.buffers[buffer].nbytes
    found, now = [], 0
    for delta in change[:-1]:
        now += delta
        found.append(now)
    return found


def _ops(plan: Plan) -> list[OpRow]:
    rows: dict[tuple[str, str, int], list[int]] = {}
    for instruction in plan.instructions:
        nbytes = sum(b.nbytes for _, b in _operands(plan, instruction) if _is_weight(b))
        choices = [(c.tactic, c.max_tokens) for c in instruction.tactics] or [("reference", 0)]
        for tactic, max_tokens in choices:
            row = rows.setdefault((instruction.op, tactic, max_tokens), [0, 0])
            row[0] += 1
            row[1] += nbytes
    return [
        OpRow(op=op, tactic=tactic, max_tokens=bucket, instructions=n, weight_bytes=nbytes)
        for (op, tactic, bucket), (n, nbytes) in sorted(rows.items())
    ]


def _weights(engine: Engine) -> list[WeightRow]:
    rows: dict[tuple[str, str], list[int]] = {}
    for buffer in engine.plan.buffers:
        if _is_weight(buffer):
            row = rows.setdefault((buffer.quant, buffer.layout), [0, 0, 0])
            row[0] += 1
            row[1] += math.prod(d for d in buffer.shape if isinstance(d, int))
            row[2] += buffer.nbytes
    return [
        WeightRow(quant=quant, layout=layout, tensors=n, values=values, nbytes=nbytes)
        for (quant, layout), (n, values, nbytes) in sorted(rows.items(), key=lambda e: -e[1][2])
    ]


def _blocks(plan: Plan) -> list[Block]:
    found: list[Block] = []
    layers = instruction_layers(plan)
    begin = 0
    while begin < len(layers):
        end = begin
        while end < len(layers) and layers[end] == layers[begin]:
            end += 1
        inside = layers[begin] is not None
        rows = tuple(_row(plan, i, inside) for i in plan.instructions[begin:end])
        before = found[-1] if found else None
        if inside and before and before.layers and before.instructions == rows:
            count = before.layers + 1
            label = f"layers {layers[begin] + 1 - count} to {layers[begin]}"  # type: ignore[operator]
            found[-1] = msgspec.structs.replace(before, label=label, layers=count)
        else:
            outside = "after the layers" if found else "before the layers"
            label = f"layer {layers[begin]}" if inside else outside
            found.append(Block(label=label, layers=int(inside), first=begin, instructions=rows))
        begin = end
    return found


def _row(plan: Plan, instruction: Instruction, inside: bool) -> InstructionRow:
    several = len(instruction.tactics) > 1
    operands = _operands(plan, instruction)
    return InstructionRow(
        name=without_layer(instruction.name) if inside else instruction.name,
        op=instruction.op,
        tactics=tuple(f"{c.tactic} <= {c.max_tokens}" if several else c.tactic for c in instruction.tactics)
        or ("reference",),
        inputs=tuple(_type(o, b) for o, b in operands if b.kind in ("arena", "input")),
        weights=tuple(
            f"{b.quant} {b.layout} [{', '.join(map(str, b.shape))}]" for _, b in operands if _is_weight(b)
        ),
        outputs=tuple(
            _type(plan.operands[o], plan.buffers[plan.operands[o].buffer]) for o in instruction.outputs
        ),
    )


def _operands(plan: Plan, instruction: Instruction) -> list[tuple[Operand, Buffer]]:
    used = [plan.operands[i] for i in instruction.inputs if i >= 0]
    return [(o, plan.buffers[o.buffer]) for o in used]


def _type(operand: Operand, buffer: Buffer) -> str:
    return f"{buffer.dtype}[{', '.join(map(str, operand.shape))}]"


def _is_weight(buffer: Buffer) -> bool:
    return buffer.kind in ("weight", "constant")
