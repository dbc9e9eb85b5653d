"""embedding on NVIDIA GPUs (``triton_embedding.py``; of packed tables ``linear/triton_unpack.py``)."""

from __future__ import annotations

from pelton.dtypes import GPU_BLOCK_TYPES
from pelton.kernels.gpu_layouts import panel_bytes
from pelton.kernels.launch import Builder, CallSpec, LaunchSpec, Term, power_of_two, rows
from pelton.kernels.linear.packed import LAYOUT, UNPACK, type_constants
from pelton.kernels.tactic import NodeSpec, Tactic

MODULE = "pelton.kernels.embedding.triton_embedding"


def gather_launch(call: CallSpec, index: int, table: int) -> LaunchSpec:
    """Rows ``index`` of ``table`` (indices of the call's inputs)."""
    source = call.input(table)
    dim = int(source.shape[1])
    block = min(1024, power_of_two(dim))
    b = Builder(call, MODULE, "gather").input("index", index).input("table", table).output("out")
    b.constants(D=dim, TABLE_ROW=source.strides[0], BLOCK=block)
    return b.launch((rows(call.input(index)),), (Term(times=-(-dim // block)),), dependent=True)


def _gather_packed(call: CallSpec, max_tokens: int) -> tuple[LaunchSpec, ...]:
    table = call.input(1)
    dim = int(table.shape[1])
    block = min(1024, power_of_two(dim))
    b = Builder(call, UNPACK, "gather_packed").input("index", 0).input("table", 1).output("out")
    b.constants(K=dim, PANEL_BYTES=panel_bytes(table.quant, dim), **type_constants(table.quant), BLOCK=block)
    return (b.launch((rows(call.input(0)),), (Term(times=-(-dim // block)),), dependent=True),)


def _supports_packed(node: NodeSpec) -> bool:
    weight = node.inputs[1]
    return weight is not None and weight.quant in GPU_BLOCK_TYPES


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
    ),
    Tactic(
        name="cuda.embedding.packed",
        op="embedding",
        device="cuda",
        supports=_supports_packed,
        precision="bfloat16",
        batch_invariant=True,
        weight_layouts={1: LAYOUT},
        launches=_gather_packed,
    ),
]
