"""quantise_results: what only a product with a static scale reads is left as codes of that scale.

Activation and attention then write a byte a value, and no launch makes codes of it before the product. The
edge is codes in steps of every size, also in the small ones whose products would take it as it is.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from pelton.dtypes import CODE_DTYPES
from pelton.ir.graph import Graph, argument, op_name
from pelton.ir.verifier import VIEWS
from pelton.kernels.tactic import TensorSpec
from pelton.passes.base import Pass, PassContext, PassReport
from pelton.passes.pattern import with_arguments

NAME = "quantise_results"
#: Products that may read codes: the residual says of which type their result is.
READERS = ("linear_add",)
#: Ops that may leave codes, by arguments ``y_scale`` and ``y_codes``.
MAKERS = ("linear_gated", "norm_linear_gated", "paged_attention", "rope_paged_attention")


def run(graph: Graph, context: PassContext) -> PassReport:
    """Give ``y_scale`` and ``y_codes`` to what such products read."""
    matched, changed, skipped = 0, 0, []
    for node in graph.calls:
        if op_name(node) not in READERS or argument(node, "x_scale") is None:
            continue
        path = _path(node)
        if op_name(path[0]) not in MAKERS:
            continue
        matched += 1
        why = _rewrite(graph, context, node, path)
        if why is None:
            changed += 1
        else:
            skipped.append((node.name, why))
    return PassReport(name=NAME, matched=matched, changed=changed, skipped=tuple(skipped))


def _path(product: fx.Node) -> list[fx.Node]:
    """What made the product's input, and the views through which it is read."""
    path: list[Any] = [product.args[0]]
    while path[0].target in VIEWS and isinstance(path[0].args[0], fx.Node):
        path.insert(0, path[0].args[0])
    return path


def _rewrite(graph: Graph, context: PassContext, product: fx.Node, path: list[fx.Node]) -> str | None:
    """Let the first node of ``path`` leave codes for ``product``; or why not."""
    maker, codes = path[0], str(argument(product, "x_codes"))
    for node in path:
        if len(node.users) > 1:
            return f"{node.name} is read elsewhere too"
    read = graph.type_of(path[-1])
    if read.strides != (read.shape[1], 1):
        return f"it reads a part of what {maker.name} gives"
    left = with_arguments(maker, y_scale=argument(product, "x_scale"), y_codes=codes)
    x = TensorSpec(dtype=CODE_DTYPES[codes], shape=read.shape)
    for op, args in ((op_name(maker), left), (op_name(product), (x, *product.args[1:]))):
        if not context.supports(graph, op, args):
            return f"the target has no kernel for {op} of these types and codes"
    maker.args, maker.kwargs = left, {}
    for node in (*path, product):
        graph.infer(node)
    return None


PASS = Pass(
    name=NAME,
    kind="graph",
    run=run,
    rewrite="linear_add(round(f(x) / d) d, w) -> linear_add(q, w), q = round(f(x) / d) left by f",
    bound="nothing: the checkpoint rounds so",
    needs=("static_inputs",),
)
