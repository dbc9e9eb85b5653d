"""add_rms_norm on NVIDIA GPUs (``triton_add_rms_norm.py``)."""

from __future__ import annotations

from pelton.kernels.launch import Builder, CallSpec, LaunchSpec, power_of_two, rows
from pelton.kernels.tactic import Tactic, float_rows

MODULE = "pelton.kernels.add_rms_norm.triton_add_rms_norm"


def launches(call: CallSpec, max_tokens: int) -> tuple[LaunchSpec, ...]:
    x, residual = call.input(0), call.input(1)
    dim = int(x.shape[1])
    b = Builder(call, MODULE, "add_rms_norm").input("x", 0).input("residual", 1).input("weight", 2)
    b.output("out", 0).output("total", 1).number("eps", float(call.attrs["eps"]))
    block = power_of_two(dim)
    b.constants(D=dim, X_ROW=x.strides[0], R_ROW=residual.strides[0], BLOCK=block)
    return (b.launch((rows(x),), num_warps=max(1, min(16, block // 512)), dependent=True),)


TACTICS = [
    Tactic(
        name="cuda.add_rms_norm",
        op="add_rms_norm",
        device="cuda",
        supports=float_rows,
        precision="bfloat16",
        batch_invariant=True,
        launches=launches,
    )
]
