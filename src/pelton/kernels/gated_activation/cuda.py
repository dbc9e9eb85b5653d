"""gated_activation on NVIDIA GPUs (``triton_gated_activation.py``)."""

from __future__ import annotations

from pelton.kernels.launch import Builder, CallSpec, LaunchSpec, Term, power_of_two, rows
from pelton.kernels.tactic import NodeSpec, Tactic, float_rows

MODULE = "pelton.kernels.gated_activation.triton_gated_activation"
KINDS = ("silu", "gelu", "gelu_tanh", "relu")


def launches(call: CallSpec, max_tokens: int) -> tuple[LaunchSpec, ...]:
    gate, up = call.input(0), call.input(1)
    width = int(gate.shape[1])
    block = min(1024, power_of_two(width))
    b = Builder(call, MODULE, "gated_activation").input("gate", 0).input("up", 1).output("out")
    b.constants(WIDTH=width, GATE_ROW=gate.strides[0], UP_ROW=up.strides[0], KIND=str(call.attrs["kind"]))
    b.constants(BLOCK=block)
    return (b.launch((rows(gate),), (Term(times=-(-width // block)),), dependent=True),)


def _supports(node: NodeSpec) -> bool:
    return float_rows(node) and node.attrs["kind"] in KINDS


TACTICS = [
    Tactic(
        name="cuda.gated_activation",
        op="gated_activation",
        device="cuda",
        supports=_supports,
        precision="bfloat16",
        batch_invariant=True,
        launches=launches,
    )
]
