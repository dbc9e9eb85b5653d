"""unary, binary, binary_scalar and copy on NVIDIA GPUs (``triton_broadcast.py``)."""

from __future__ import annotations

from pelton.kernels.launch import Builder, CallSpec, LaunchSpec, OperandSpec, Term, power_of_two, rows
from pelton.kernels.tactic import NodeSpec, Tactic, float_rows

MODULE = "pelton.kernels.binary.triton_broadcast"


def _strides(operand: OperandSpec, out: OperandSpec) -> tuple[int, int, int]:
    """(row, head, column) steps through ``operand`` for a result of ``out``'s shape."""
    steps = dict.fromkeys(range(len(out.shape)), 0)
    missing = len(out.shape) - len(operand.shape)
    for axis, (size, stride) in enumerate(zip(operand.shape, operand.strides, strict=True), missing):
        if size != 1:
            steps[axis] = stride
    return steps[0], steps[1] if len(steps) == 3 else 0, steps[len(steps) - 1] if len(steps) > 1 else 0


def launch(call: CallSpec, kind: str, *, number: float = 0.0) -> LaunchSpec:
    """``kind`` of input 0 with input 1 where there is one, else with ``number``."""
    out = call.outputs[0]
    pair = len(call.inputs) > 1
    heads, dim = (
        int(out.shape[1]) if len(out.shape) == 3 else 1,
        int(out.shape[-1]) if len(out.shape) > 1 else 1,
    )
    block = min(1024, power_of_two(dim))
    b = Builder(call, MODULE, "broadcast").input("x", 0)
    if pair:
        b.input("y", 1)
    else:
        b.constants(y=None)
    b.output("out").number("number", number).constants(HEADS=heads, D=dim, KIND=kind, BLOCK=block)
    for name, operand in (("X", call.input(0)), ("Y", call.input(1) if pair else call.input(0))):
        row, head, column = _strides(operand, out)
        b.constants(**{f"{name}_ROW": row, f"{name}_HEAD": head, f"{name}_COLUMN": column})
    return b.launch((rows(out),), (Term(times=heads),), (Term(times=-(-dim // block)),))


def supports(node: NodeSpec) -> bool:
    """Float operands of one to three axes."""
    return all(
        t is not None and 0 < len(t.shape) <= 3 and t.dtype != "int32" for t in node.inputs
    ) and float_rows(node)


def tactic(op: str, attribute: str = "kind", number: str = "") -> Tactic:
    """The tactic of an op whose kind is its attribute ``attribute``, its number ``number``."""

    def launches(call: CallSpec, max_tokens: int) -> tuple[LaunchSpec, ...]:
        kind = str(call.attrs[attribute]) if attribute else "copy"
        return (launch(call, kind, number=float(call.attrs[number]) if number else 0.0),)

    return Tactic(
        name=f"cuda.{op}",
        op=op,
        device="cuda",
        supports=supports,
        precision="bfloat16",
        batch_invariant=True,
        launches=launches,
    )


TACTICS = [tactic("binary")]
