"""What a step reads next: kernels fetch the beginning of the next weight into L2 while they end.

Between two kernels no memory is read: the blocks of one end together, and those of the next begin, ask and
wait. What a kernel has asked for before it ends bridges that.
"""

from __future__ import annotations

import ctypes as C
from collections.abc import Callable
from dataclasses import dataclass

from pelton.engine.plan import Instruction, Operand, Plan

#: Bytes below which a weight is not worth it.
_SMALLEST = 1 << 20
#: Rows that ``NextWeight`` counts in.
_ROWS = 16


@dataclass(frozen=True)
class NextWeight:
    """A matrix in memory: ``count`` times 16 rows of ``nbytes`` each; all zeros: none."""

    address: int = 0
    nbytes: int = 0
    count: int = 0

    def parameters(self) -> tuple[C.c_uint64, C.c_int32, C.c_int32]:
        """As a kernel takes them (``kernels.launch.Argument``)."""
        return C.c_uint64(self.address), C.c_int32(self.nbytes), C.c_int32(self.count)


def next_weights(plan: Plan, address_of: Callable[[Operand], int]) -> list[NextWeight]:
    """For each instruction the matrix that the first one behind it has which multiplies one."""
    found = [NextWeight()] * len(plan.instructions)
    for i in reversed(range(len(found) - 1)):
        found[i] = _weight(plan, plan.instructions[i + 1], address_of) or found[i + 1]
    return found


def _weight(plan: Plan, instruction: Instruction, address_of: Callable[[Operand], int]) -> NextWeight | None:
    """The matrix that ``instruction`` reads whole."""
    for index in instruction.inputs:
        if index < 0:
            continue
        operand = plan.operands[index]
        buffer = plan.buffers[operand.buffer]
        whole = operand.offset == 0 and len(operand.shape) == 2 and operand.shape == buffer.shape
        if (
            buffer.kind != "weight"
            or not whole
            or buffer.nbytes < _SMALLEST
            or "linear" not in instruction.op
        ):
            continue
        rows = operand.shape[0]
        assert isinstance(rows, int)
        count = rows // _ROWS
        return NextWeight(address_of(operand), buffer.nbytes // count // _ROWS * _ROWS, count)
    return None
