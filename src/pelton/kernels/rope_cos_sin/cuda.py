"""rope_cos_sin on NVIDIA GPUs (``triton_rope_cos_sin.py``)."""

from __future__ import annotations

from pelton.kernels.launch import Builder, CallSpec, LaunchSpec, power_of_two, rows
from pelton.kernels.tactic import Tactic

MODULE = "pelton.kernels.rope_cos_sin.triton_rope_cos_sin"


def launches(call: CallSpec, max_tokens: int) -> tuple[LaunchSpec, ...]:
    half = int(call.input(1).shape[0])
    b = Builder(call, MODULE, "rope_cos_sin").input("positions", 0).input("inv_freq", 1).output("out")
    b.number("scale", float(call.attrs["scale"])).constants(HALF=half, BLOCK=power_of_two(half))
    return (b.launch((rows(call.input(0)),), num_warps=1, dependent=True),)


TACTICS = [
    Tactic(
        name="cuda.rope_cos_sin",
        op="rope_cos_sin",
        device="cuda",
        supports=lambda node: True,
        batch_invariant=True,
        launches=launches,
    )
]
