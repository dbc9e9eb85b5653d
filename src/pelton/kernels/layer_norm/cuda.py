"""layer_norm on NVIDIA GPUs (``triton_layer_norm.py``)."""

from __future__ import annotations

from pelton.kernels.launch import Builder, CallSpec, LaunchSpec, Term, power_of_two, rows
from pelton.kernels.tactic import Tactic, float_rows

MODULE = "pelton.kernels.layer_norm.triton_layer_norm"


def launches(call: CallSpec, max_tokens: int) -> tuple[LaunchSpec, ...]:
    x = call.input(0)
    dim = int(x.shape[-1])
    heads = int(x.shape[1]) if len(x.shape) == 3 else 1
    block = power_of_two(dim)
    b = Builder(call, MODULE, "layer_norm").input("x", 0).input("weight", 1).input("bias", 2).output("out")
    b.number("eps", float(call.attrs["eps"])).constants(HEADS=heads, D=dim, BLOCK=block)
    b.constants(X_ROW=x.strides[0], X_HEAD=x.strides[1] if heads > 1 else 0)
    return (b.launch((rows(x),), (Term(times=heads),), num_warps=max(1, min(16, block // 512))),)


TACTICS = [
    Tactic(
        name="cuda.layer_norm",
        op="layer_norm",
        device="cuda",
        supports=float_rows,
        precision="bfloat16",
        batch_invariant=True,
        launches=launches,
    )
]
