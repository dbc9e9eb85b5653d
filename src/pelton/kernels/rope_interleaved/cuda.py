"""rope_interleaved on NVIDIA GPUs (``triton_rope_interleaved.py``)."""

from __future__ import annotations

from pelton.kernels.launch import Builder, CallSpec, LaunchSpec, Term, power_of_two, rows
from pelton.kernels.tactic import Tactic, float_rows

MODULE = "pelton.kernels.rope_interleaved.triton_rope_interleaved"


def launches(call: CallSpec, max_tokens: int) -> tuple[LaunchSpec, ...]:
    x, cos_sin = call.input(0), call.input(1)
    heads, dim = int(x.shape[1]), int(x.shape[2])
    b = Builder(call, MODULE, "rope_interleaved").input("x", 0).input("cos_sin", 1).output("out")
    b.constants(HEADS=heads, D=dim, HALF=int(cos_sin.shape[1]) // 2, X_ROW=x.strides[0])
    b.constants(X_HEAD=x.strides[1], BLOCK=power_of_two(dim))
    return (b.launch((rows(x),), (Term(times=heads),), num_warps=1),)


TACTICS = [
    Tactic(
        name="cuda.rope_interleaved",
        op="rope_interleaved",
        device="cuda",
        supports=float_rows,
        precision="bfloat16",
        batch_invariant=True,
        launches=launches,
    )
]
