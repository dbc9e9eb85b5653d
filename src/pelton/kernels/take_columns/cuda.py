"""take_columns on NVIDIA GPUs (``triton_take_columns.py``)."""

from __future__ import annotations

from pelton.kernels.launch import Builder, CallSpec, LaunchSpec, Term, power_of_two, rows
from pelton.kernels.tactic import Tactic, float_rows

MODULE = "pelton.kernels.take_columns.triton_take_columns"


def _launch(call: CallSpec) -> LaunchSpec:
    x = call.input(0)
    dim = int(x.shape[1])
    block = min(1024, power_of_two(dim))
    b = Builder(call, MODULE, "take_columns").input("x", 0).input("order", 1).output("out")
    b.constants(D=dim, X_ROW=x.strides[0], BLOCK=block)
    return b.launch((rows(x),), (Term(times=-(-dim // block)),))


TACTICS = [
    Tactic(
        name="cuda.take_columns",
        op="take_columns",
        device="cuda",
        supports=float_rows,
        precision="bfloat16",
        batch_invariant=True,
        launches=lambda call, max_tokens: (_launch(call),),
    )
]
