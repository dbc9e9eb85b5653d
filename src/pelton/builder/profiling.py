"""How much of the model's names a plan keeps, for profilers, debuggers and extra outputs."""

from __future__ import annotations

import msgspec

from pelton.engine.plan import Instruction, Plan


def with_names(plan: Plan, profiling: str) -> Plan:
    """``plan`` with the names that ``profiling`` keeps (``BuildConfig.profiling``): none of instructions
    and intermediate tensors, all of them, or besides what each instruction does to which shapes."""
    replace = msgspec.structs.replace
    if profiling == "names":
        return plan
    if profiling == "detailed":
        instructions = tuple(replace(i, detail=_detail(i, plan)) for i in plan.instructions)
        return replace(plan, instructions=instructions)
    return replace(
        plan,
        buffers=tuple(
            replace(b, name=f"#{n}") if b.kind == "arena" else b for n, b in enumerate(plan.buffers)
        ),
        operands=tuple(replace(o, name=f"#{n}") for n, o in enumerate(plan.operands)),
        instructions=tuple(replace(i, name=f"#{n}") for n, i in enumerate(plan.instructions)),
    )


def _detail(instruction: Instruction, plan: Plan) -> str:
    """Such as ``linear(x[T,64] float32, model.norm.weight[96,64] q4_0 x16) -> [T,96] float32``."""

    def text(index: int) -> str:
        if index < 0:
            return "-"
        operand = plan.operands[index]
        buffer = plan.buffers[operand.buffer]
        stored = f"{buffer.quant} {buffer.layout}" if buffer.quant else buffer.dtype
        return f"{buffer.name}[{','.join(map(str, operand.shape))}] {stored}"

    attrs = "".join(f", {name}={value}" for name, value in instruction.attrs.items())
    inputs = ", ".join(map(text, instruction.inputs))
    return f"{instruction.op}({inputs}{attrs}) -> {', '.join(map(text, instruction.outputs)) or '()'}"
