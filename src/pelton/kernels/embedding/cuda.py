"""embedding on NVIDIA GPUs (``triton_embedding.py``)."""

from __future__ import annotations

from pelton.kernels.launch import Builder, CallSpec, LaunchSpec, Term, power_of_two, rows
from pelton.kernels.tactic import NodeSpec, Tactic

MODULE = "pelton.kernels.embedding.triton_embedding"


def gather_launch(call: CallSpec, index: int, table: int) -> LaunchSpec:
    """Rows ``index`` of ``table`` (indices of the call's inputs)."""
    source = call.input(table)
    dim = int(source.shape[1])
    block = min(1024, power_of_two(dim))
    b = Builder(call, MODULE, "gather").input("index", index).input("table", table).output("out")
    b.constants(D=dim, TABLE_ROW=source.strides[0], BLOCK=block)
    return b.launch((rows(call.input(index)),), (Term(times=-(-dim // block)),))


def _supports(node: NodeSpec) -> bool:
    weight = node.inputs[1]
    return weight is not None and (weight.quant or weight.dtype) in ("float32", "float16", "bfloat16")


TACTICS = [
    Tactic(
        name="cuda.embedding",
        op="embedding",
        device="cuda",
        supports=_supports,
        precision="bfloat16",
        batch_invariant=True,
        launches=lambda call, max_tokens: (gather_launch(call, 0, 1),),
    )
]
