"""rms_norm on NVIDIA GPUs (``triton_rms_norm.py``)."""

from __future__ import annotations

from pelton.kernels.launch import Builder, CallSpec, LaunchSpec, Term, power_of_two, rows
from pelton.kernels.tactic import Tactic, float_rows

MODULE = "pelton.kernels.rms_norm.triton_rms_norm"


def norm_launch(call: CallSpec, weight: int = 1, *, to_workspace: bool = False) -> LaunchSpec:
    """Input 0, normed with the weight at input ``weight``, to the output or the workspace's beginning.

    To the workspace it is part of another op (pass ``norm_gemm``), whose norm is a weight of the checkpoint.
    """
    x = call.input(0)
    dim = int(x.shape[-1])
    heads = int(x.shape[1]) if len(x.shape) == 3 else 1
    b = Builder(call, MODULE, "rms_norm").input("x", 0).input("weight", weight)
    b = b.workspace("out", dtype=x.dtype) if to_workspace else b.output("out")
    b.number("eps", float(call.attrs["eps"]))
    b.constants(HEADS=heads, D=dim, X_ROW=x.strides[0], X_HEAD=x.strides[1] if heads > 1 else 0)
    block = power_of_two(dim)
    b.constants(BLOCK=block, CONSTANT=to_workspace)
    warps = max(1, min(16, block // 512))
    return b.launch((rows(x),), (Term(times=heads),), num_warps=warps, dependent=True)


def launches(call: CallSpec, max_tokens: int) -> tuple[LaunchSpec, ...]:
    return (norm_launch(call),)


TACTICS = [
    Tactic(
        name="cuda.rms_norm",
        op="rms_norm",
        device="cuda",
        supports=float_rows,
        precision="bfloat16",
        batch_invariant=True,
        launches=launches,
    )
]
