"""What each instruction of a GPU plan launches: tactics asked about operands as they lie in memory."""

from __future__ import annotations

from collections.abc import Sequence

from pelton.builder.cubins import CodeWriter
from pelton.builder.tactics import Table
from pelton.dtypes import ITEMSIZE, is_dense
from pelton.engine.plan import Instruction, Plan
from pelton.errors import BuildError
from pelton.kernels.launch import CallSpec, OperandSpec

#: Bytes that a pointer known as aligned is a multiple of.
_ALIGNED = 16


def plan_launches(plan: Plan, tables: Sequence[Table], sm: int) -> CodeWriter:
    """The launches of ``plan``, whose instructions have the tactics of ``tables``, for ``sm``.

    Raises ``BuildError`` for an instruction that no tactic can run.
    """
    writer = CodeWriter(sm, int(plan.operands[plan.logits].shape[1]))
    for instruction, table in zip(plan.instructions, tables, strict=True):
        if not table:
            raise BuildError(
                f"no GPU kernel runs {instruction.name} ({instruction.op}); build for the CPU, or give the "
                "op a CUDA tactic"
            )
        call = call_spec(plan, instruction)
        by_tactic = {}
        for max_tokens, tactic in table:
            assert tactic.launches is not None
            rows = min(max_tokens, _most_rows(plan, instruction))
            decode = None if tactic.decode is None else tactic.decode(call, rows)
            by_tactic[tactic.name] = tactic.launches(call, rows), decode
        writer.add(by_tactic)
    return writer


def _most_rows(plan: Plan, instruction: Instruction) -> int:
    """Rows that the instruction's operands have room for: of logits there are fewer than tokens."""
    dims = [plan.operands[i].shape[0] for i in instruction.outputs]
    return min((plan.dims[d] for d in dims if isinstance(d, str) and d in plan.dims), default=plan.dims["T"])


def call_spec(plan: Plan, instruction: Instruction) -> CallSpec:
    """The instruction with its operands in memory."""

    def operand(index: int) -> OperandSpec:
        o = plan.operands[index]
        buffer = plan.buffers[o.buffer]
        return OperandSpec(
            dtype=buffer.dtype,
            shape=o.shape,
            strides=o.strides,
            aligned=o.offset * ITEMSIZE[buffer.dtype] % _ALIGNED == 0,
            quant="" if is_dense(buffer.quant or buffer.dtype) else buffer.quant,
        )

    return CallSpec(
        inputs=tuple(None if i < 0 else operand(i) for i in instruction.inputs),
        outputs=tuple(operand(i) for i in instruction.outputs),
        attrs=instruction.attrs,
    )
