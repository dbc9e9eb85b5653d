"""rope on NVIDIA GPUs, rotate-half and interleaved (``triton_rope.py``)."""

from __future__ import annotations

from pelton.kernels.launch import Builder, CallSpec, LaunchSpec, Term, power_of_two, rows
from pelton.kernels.tactic import Tactic, float_rows


def rope_tactic(op: str, *, interleaved: bool) -> Tactic:
    """The tactic of ``op``, which rotates halves of a head or neighbours with each other."""

    def launches(call: CallSpec, max_tokens: int) -> tuple[LaunchSpec, ...]:
        x, cos_sin = call.input(0), call.input(1)
        heads, dim = int(x.shape[1]), int(x.shape[2])
        b = Builder(call, "pelton.kernels.rope.triton_rope", "rope")
        b.input("x", 0).input("cos_sin", 1).output("out")
        b.constants(HEADS=heads, D=dim, HALF=int(cos_sin.shape[1]) // 2, X_ROW=x.strides[0])
        b.constants(X_HEAD=x.strides[1], BLOCK=power_of_two(dim), INTERLEAVED=interleaved)
        return (b.launch((rows(x),), (Term(times=heads),), num_warps=1),)

    return Tactic(
        name=f"cuda.{op}",
        op=op,
        device="cuda",
        supports=float_rows,
        precision="bfloat16",
        batch_invariant=True,
        launches=launches,
    )


TACTICS = [rope_tactic("rope", interleaved=False)]
