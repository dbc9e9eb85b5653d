"""reduce and softmax on NVIDIA GPUs (``triton_reduce.py``)."""

from __future__ import annotations

from pelton.kernels.launch import Builder, CallSpec, LaunchSpec, Term, power_of_two, rows
from pelton.kernels.tactic import NodeSpec, Tactic, float_rows

MODULE = "pelton.kernels.reduce.triton_reduce"
#: A row is held in the registers of one program.
MAX_DIM = 1 << 16


def launch(call: CallSpec, kind: str) -> LaunchSpec:
    """``kind``: sum, mean, max or softmax over the last axis of input 0."""
    x = call.input(0)
    heads, dim = int(x.shape[1]) if len(x.shape) == 3 else 1, int(x.shape[-1])
    b = Builder(call, MODULE, "reduce").input("x", 0).output("out")
    b.constants(HEADS=heads, D=dim, X_ROW=x.strides[0], X_HEAD=x.strides[1] if heads > 1 else 0)
    b.constants(KIND=kind, BLOCK=power_of_two(dim))
    return b.launch((rows(x),), (Term(times=heads),), num_warps=4 if dim <= 4096 else 8)


def _supports(node: NodeSpec) -> bool:
    (x,) = node.inputs
    return x is not None and len(x.shape) in (2, 3) and int(x.shape[-1]) <= MAX_DIM and float_rows(node)


def tactic(op: str, kind: str = "") -> Tactic:
    """The tactic of ``op``: ``kind``, or what its attribute says."""
    return Tactic(
        name=f"cuda.{op}",
        op=op,
        device="cuda",
        supports=_supports,
        precision="bfloat16",
        batch_invariant=True,
        launches=lambda call, max_tokens: (launch(call, kind or str(call.attrs["kind"])),),
    )


TACTICS = [tactic("reduce")]
