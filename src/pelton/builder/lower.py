"""From calls to the plan: buffers, arena offsets, operands, instructions."""

from __future__ import annotations

import math
from collections.abc import Mapping

from pelton.builder.calls import Call, Program, Root, Value
from pelton.builder.memory import Lifetime, lower_bound, plan_arena
from pelton.builder.tactics import ROWS, Choice
from pelton.dtypes import ITEMSIZE, is_dense
from pelton.engine.plan import Buffer, BufferKind, Instruction, Operand, Plan, TacticChoice
from pelton.engine.plan_check import dim_values
from pelton.kernels.layouts import LAYOUTS


def lower(program: Program, choice: Choice, quants: Mapping[Root, str], dims: Mapping[str, int]) -> Plan:
    """The plan of ``program`` for steps up to ``dims`` (T, B, N).

    ``quants``: stored value type of each weight and constant.
    """
    offsets, arena_bytes = _place(program, dims)
    table = _Table(choice, quants, offsets, dims)
    instructions = []
    workspace = 0
    for call, tactics, spec in zip(program.calls, choice.tables, choice.specs, strict=True):
        workspace = max((workspace, *(tactic.workspace(spec, tokens) for tokens, tactic in tactics)))
        instructions.append(
            Instruction(
                op=call.op.name,
                name=call.name,
                inputs=tuple(-1 if v is None else table.operand(v) for v in call.inputs),
                outputs=tuple(table.operand(v) for v in call.outputs),
                attrs=call.attrs,
                tactics=tuple(TacticChoice(max_tokens=n, tactic=tactic.name) for n, tactic in tactics),
            )
        )
    return Plan(
        dims=dict(dims),
        logits=table.operand(program.logits),
        buffers=tuple(table.buffers),
        operands=tuple(table.operands),
        instructions=tuple(instructions),
        arena_bytes=arena_bytes,
        workspace_bytes=workspace,
    )


class _Table:
    """Buffers and operands in the order of first use."""

    def __init__(
        self,
        choice: Choice,
        quants: Mapping[Root, str],
        offsets: Mapping[Root, int],
        dims: Mapping[str, int],
    ) -> None:
        self._choice, self._quants, self._offsets, self._dims = choice, quants, offsets, dims
        self.buffers: list[Buffer] = []
        self.operands: list[Operand] = []
        self._buffer_of: dict[Root, int] = {}
        self._operand_of: dict[Value, int] = {}

    def operand(self, value: Value) -> int:
        if value not in self._operand_of:
            if value.root not in self._buffer_of:
                self._buffer_of[value.root] = len(self.buffers)
                self.buffers.append(self._buffer(value.root))
            self._operand_of[value] = len(self.operands)
            self.operands.append(
                Operand(
                    name=value.name,
                    buffer=self._buffer_of[value.root],
                    shape=value.shape,
                    strides=value.strides,
                    offset=value.offset,
                )
            )
        return self._operand_of[value]

    def _buffer(self, root: Root) -> Buffer:
        if root.source is None:
            return Buffer(
                name=root.name,
                kind="arena",
                dtype=root.dtype,
                shape=root.shape,
                offset=self._offsets[root],
                nbytes=root_bytes(root, self._dims),
            )
        kind: BufferKind = root.source.kind
        if kind in ("weight", "constant"):
            quant, layout = self._quants[root], self._choice.layouts[root]
            shape = tuple(d for d in root.shape if isinstance(d, int))
            return Buffer(
                name=root.name,
                kind=kind,
                dtype=quant if layout == ROWS and is_dense(quant) else "uint8",
                shape=shape,
                nbytes=LAYOUTS[layout].nbytes(quant, shape),
                quant=quant,
                layout=layout,
            )
        return Buffer(
            name=root.name,
            kind=kind,
            dtype=root.dtype,
            shape=root.shape,
            layer=root.source.layer,
            group=root.source.group,
        )


def input_bytes(plan: Plan) -> int:
    """Bytes of a step's input arrays at the largest step."""
    sizes = dim_values(plan.dims)
    shapes = (
        (sizes[d] if isinstance(d, str) else d for d in b.shape) for b in plan.buffers if b.kind == "input"
    )
    return ITEMSIZE["int32"] * sum(math.prod(shape) for shape in shapes)


def root_bytes(root: Root, dims: Mapping[str, int]) -> int:
    """Bytes of an intermediate tensor at the largest step."""
    sizes = dim_values(dims)
    total = ITEMSIZE[root.dtype]
    for dim in root.shape:
        total *= sizes[dim] if isinstance(dim, str) else dim
    return total


def arena_lower_bound(program: Program, dims: Mapping[str, int]) -> int:
    """Most bytes of intermediate tensors alive at once."""
    return lower_bound(_lifetimes(program, dims)[1])


def _place(program: Program, dims: Mapping[str, int]) -> tuple[dict[Root, int], int]:
    roots, lifetimes = _lifetimes(program, dims)
    offsets, total = plan_arena(lifetimes)
    return dict(zip(roots, offsets, strict=True)), total


def _lifetimes(program: Program, dims: Mapping[str, int]) -> tuple[list[Root], list[Lifetime]]:
    """A root is alive from the call that makes it to the last use of any view of it.

    What rows are taken of lives as long as they do: it stands for all rows (``engine.cuda.same_rows``).
    """
    first: dict[Root, int] = {}
    last: dict[Root, int] = {}
    for i, call in enumerate(program.calls):
        for root in _arena_roots(call):
            first.setdefault(root, i)
            last[root] = i
    last[program.logits.root] = len(program.calls)
    for call in reversed(program.calls):
        if call.op.name == "take_rows" and call.inputs[0] is not None and call.inputs[0].root in last:
            source = call.inputs[0].root
            last[source] = max(last[source], last[call.outputs[0].root])
    roots = list(first)
    return roots, [Lifetime(root_bytes(root, dims), first[root], last[root]) for root in roots]


def _arena_roots(call: Call) -> list[Root]:
    values = (*call.inputs, *call.outputs)
    return [v.root for v in values if v is not None and v.root.source is None]
