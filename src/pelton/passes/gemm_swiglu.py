"""gemm_swiglu: a stacked gate and up projection and their gated activation become one op.

The kernel holds a row of the gate and of the up product at the same time, so the activation (SwiGLU,
GeGLU) costs no memory traffic: 2 I values a token are neither written nor read again.
"""

from __future__ import annotations

from pelton.ir.graph import Graph
from pelton.passes.base import Pass, PassContext, PassReport
from pelton.passes.pattern import Match, call, item, rewrite, tensor, value, weight

NAME = "gemm_swiglu"

PRODUCT = call("linear", tensor("x"), weight("weight"), value("bias"), name="product")
HALVES = call(("aten.split.Tensor", "aten.split_with_sizes.default", "aten.chunk.default"), PRODUCT)
GATED = call("gated_activation", item(HALVES, 0, name="gate"), item(HALVES, 1), value("kind"))


def run(graph: Graph, context: PassContext) -> PassReport:
    """Rewrite ``gate, up = split(linear(x, w, b)); gated_activation(gate, up)`` to ``linear_gated``."""
    return rewrite(graph, context, NAME, PATTERNS)


def _fuse(m: Match) -> str | None:
    gate, product = m.graph.type_of(m["gate"]), m.graph.type_of(m["product"])
    if gate.shape[1] * 2 != product.shape[1]:
        return f"{m['product'].name} has {product.shape[1]} columns, not two halves of {gate.shape[1]}"
    return m.fuse("linear_gated", (m["x"], m["weight"], m["bias"], m["kind"]))


#: What is looked for, and what is done there.
PATTERNS = ((GATED, _fuse),)

PASS = Pass(
    name=NAME,
    kind="graph",
    run=run,
    rewrite="gated_activation(split(linear(x))) -> linear_gated(x)",
    bound="float32 rounding",
    needs=("fuse_gate_mlp", "fuse_products"),
)
