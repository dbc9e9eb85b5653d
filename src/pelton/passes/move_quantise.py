"""move_quantise: quantising moves up to what made the rows, dequantising down into the products.

``linear(dequantize_q8(q), w)`` is ``linear_q8(q, w)``: integers are multiplied, and scaled once a block.
A quantisation of rows that are only viewed otherwise is one of the rows as they were made, so that all
readers share it. Rows that are picked (``take_rows``) are quantised after picking: there are fewer.
"""

from __future__ import annotations

from torch import fx

from pelton.ir.graph import Graph, op_name
from pelton.ir.verifier import VIEWS
from pelton.passes.base import Pass, PassContext, PassReport
from pelton.passes.pattern import Match, call, rewrite, tensor, value, weight

NAME = "move_quantise"

BACK = call("dequantize_q8", tensor("x_q8"), name="back", shared=True)
PRODUCT = call("linear", BACK, weight("weight"), value("bias"))
GATED = call("linear_gated", BACK, weight("weight"), value("bias"), value("kind"))
ROUND_TRIP = call("quantize_q8", BACK)


def run(graph: Graph, context: PassContext) -> PassReport:
    """Rewrite products of ``dequantize_q8`` to ``*_q8`` ops, and quantise what views look at."""
    report = rewrite(graph, context, NAME, PATTERNS)
    moved = _move_up(graph)
    for node in reversed(graph.calls):
        if op_name(node) == "dequantize_q8" and not node.users:
            graph.erase(node)
    return PassReport(
        name=NAME, matched=report.matched + moved, changed=report.changed + moved, skipped=report.skipped
    )


def _cancel(m: Match) -> str | None:
    m.root.replace_all_uses_with(m["x_q8"])
    m.erase()
    return None


def _move_up(graph: Graph) -> int:
    """Quantise the viewed rows where a view has the same rows; share what is then the same."""
    moved = 0
    first: dict[fx.Node, fx.Node] = {}
    for node in graph.calls:
        if op_name(node) != "quantize_q8":
            continue
        x = node.args[0]
        assert isinstance(x, fx.Node)
        origin = _same_rows(graph, x)
        kept = first.setdefault(origin, node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            graph.erase(node)
            moved += 1
        elif origin is not x:
            node.update_arg(0, origin)
            moved += 1
    return moved


def _same_rows(graph: Graph, x: fx.Node) -> fx.Node:
    """The first tensor that ``x`` is a view of and that has the same rows."""
    origin, node = x, x
    while node.target in VIEWS and isinstance(node.args[0], fx.Node):
        node = node.args[0]
        if not isinstance(node.meta["val"], list | tuple) and graph.type_of(node) == graph.type_of(x):
            origin = node
    return origin


#: What is looked for, and what is done there.
PATTERNS = (
    (PRODUCT, lambda m: m.fuse("linear_q8", (m["x_q8"], m["weight"], m["bias"]))),
    (GATED, lambda m: m.fuse("linear_gated_q8", (m["x_q8"], m["weight"], m["bias"], m["kind"]))),
    (ROUND_TRIP, _cancel),
)

PASS = Pass(
    name=NAME,
    kind="graph",
    run=run,
    rewrite="linear(dequantize_q8(q), w) -> linear_q8(q, w); quantize_q8(view(x)) -> quantize_q8(x)",
    bound="float32 rounding",
    needs=("explicit_quantise",),
    fast=False,
)
