"""Where ``take_rows`` takes all rows, as in a decode step, its input stands for its result: nothing is run.

That needs the input's memory to be as it was until the result's last reader: ``builder.lower`` keeps it.
"""

from __future__ import annotations

from pelton.engine.plan import Plan


def same_rows(plan: Plan) -> dict[int, int]:
    """By result of a ``take_rows``, what it is where every row is wanted; both operands by index."""
    found = {}
    for index, instruction in enumerate(plan.instructions):
        if instruction.op == "take_rows":
            source, result = instruction.inputs[0], instruction.outputs[0]
            if _interchangeable(plan, source, result) and _stays(plan, source, result, index):
                found[result] = source
    return found


def _interchangeable(plan: Plan, source: int, result: int) -> bool:
    """Whether a reader cannot tell one from the other."""
    a, b = plan.operands[source], plan.operands[result]
    x, y = plan.buffers[a.buffer], plan.buffers[b.buffer]
    views = sum(o.buffer == b.buffer for o in plan.operands)
    alike = a.strides == b.strides and a.shape[1:] == b.shape[1:] and x.dtype == y.dtype
    return alike and a.offset == b.offset and x.kind == y.kind == "arena" and views == 1


def _stays(plan: Plan, source: int, result: int, taken: int) -> bool:
    """Whether nothing is written over ``source`` before ``result`` is read for the last time."""
    mine = plan.buffers[plan.operands[source].buffer]
    readers = [i for i, each in enumerate(plan.instructions) if result in each.inputs]
    if result == plan.logits or not readers:
        return False
    for instruction in plan.instructions[taken + 1 : readers[-1] + 1]:
        for output in instruction.outputs:
            other = plan.buffers[plan.operands[output].buffer]
            apart = other.offset >= mine.offset + mine.nbytes or mine.offset >= other.offset + other.nbytes
            if other.kind == "arena" and not apart:
                return False
    return True
