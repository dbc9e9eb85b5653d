"""static_inputs: products whose input the checkpoint rounds with a static scale are told of it.

A product of several stacked layers has one input, and the largest of their scales.
"""

from __future__ import annotations

from torch import fx

from pelton.ir.graph import Graph, op_name
from pelton.passes.base import Pass, PassContext, PassReport
from pelton.passes.folding import name_of
from pelton.passes.pattern import is_weight, with_arguments

NAME = "static_inputs"
#: Ops of products, which have arguments ``x_scale`` and ``x_codes``.
PRODUCTS = ("linear", "linear_add", "linear_gated", "norm_linear", "norm_linear_gated")


def run(graph: Graph, context: PassContext) -> PassReport:
    """Give ``x_scale`` and ``x_codes`` to every product whose weight's layers have static scales."""
    matched, changed, skipped = 0, 0, []
    for node in graph.calls:
        if op_name(node) not in PRODUCTS or not is_weight(graph, node.args[1]):
            continue
        weight = node.args[1]
        assert isinstance(weight, fx.Node)
        quants = context.input_quants(graph.recipes[name_of(graph, weight)])
        static = [q for q in quants if q is not None and q.scale > 0]
        if not static:
            continue
        matched += 1
        scale, codes = max(q.scale for q in static), static[0].dtype
        args = with_arguments(node, x_scale=scale, x_codes=codes)
        if len(static) < len(quants) or {q.dtype for q in static} != {codes}:
            why = "not every layer of which the weight is made has such an input"
        elif codes != context.activations:
            why = f"activations are {context.activations}"
        elif not context.supports(graph, op_name(node), args):
            why = f"the target has no kernel for {op_name(node)} of these types and a static scale"
        else:
            node.args, node.kwargs = args, {}
            changed += 1
            continue
        skipped.append((node.name, why))
    return PassReport(name=NAME, matched=matched, changed=changed, skipped=tuple(skipped))


PASS = Pass(
    name=NAME,
    kind="graph",
    run=run,
    rewrite="linear(x, w) -> linear(round(x / d) d, w), where the checkpoint has d",
    bound="nothing: the checkpoint rounds so",
    needs=("gemm_residual", "norm_gemm"),
)
