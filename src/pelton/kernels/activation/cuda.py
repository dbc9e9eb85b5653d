"""Elementwise ops on NVIDIA GPUs (``triton_pointwise.py``)."""

from __future__ import annotations

from pelton.kernels.gated_activation.cuda import KINDS
from pelton.kernels.launch import Builder, CallSpec, LaunchSpec, Term, power_of_two, rows
from pelton.kernels.tactic import NodeSpec, Tactic, float_rows

MODULE = "pelton.kernels.activation.triton_pointwise"


def pointwise_launch(call: CallSpec, kind: str, *, number: float = 0.0) -> LaunchSpec:
    """``kind`` over input 0 (and 1, of the same shape, where there is one) with ``number``."""
    x = call.input(0)
    y = call.input(1) if len(call.inputs) > 1 else x
    dim = int(x.shape[-1])
    heads = int(x.shape[1]) if len(x.shape) == 3 else 1
    block = min(1024, power_of_two(dim))
    b = Builder(call, MODULE, "pointwise").input("x", 0)
    if len(call.inputs) > 1:
        b.input("y", 1)
    else:
        b.constants(y=None)
    b.output("out").number("number", number).constants(HEADS=heads, D=dim, KIND=kind, BLOCK=block)
    b.constants(X_ROW=x.strides[0], X_HEAD=x.strides[1] if heads > 1 else 0)
    b.constants(Y_ROW=y.strides[0], Y_HEAD=y.strides[1] if heads > 1 else 0)
    return b.launch((rows(x),), (Term(times=heads),), (Term(times=-(-dim // block)),))


def pointwise_tactic(op: str, kind: str, attribute: str = "") -> Tactic:
    """The tactic of an op that is ``kind`` with the number in ``attribute``."""

    def launches(call: CallSpec, max_tokens: int) -> tuple[LaunchSpec, ...]:
        number = float(call.attrs[attribute]) if attribute else 0.0
        return (pointwise_launch(call, kind, number=number),)

    return Tactic(
        name=f"cuda.{op}",
        op=op,
        device="cuda",
        supports=float_rows,
        precision="bfloat16",
        batch_invariant=True,
        launches=launches,
    )


def _supports(node: NodeSpec) -> bool:
    return float_rows(node) and node.attrs["kind"] in KINDS


TACTICS = [
    Tactic(
        name="cuda.activation",
        op="activation",
        device="cuda",
        supports=_supports,
        precision="bfloat16",
        batch_invariant=True,
        launches=lambda call, max_tokens: (pointwise_launch(call, str(call.attrs["kind"])),),
    )
]
