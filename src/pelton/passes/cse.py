"""cse: calls of the same op on the same things are one (common subexpressions), weights made alike too.

KV writes are never merged, and a call that reads a cache equals another only with no write in between.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import fx

from pelton.ir.graph import Graph
from pelton.ir.verifier import VIEWS
from pelton.passes.base import Pass, PassContext, PassReport

NAME = "cse"


def run(graph: Graph, context: PassContext) -> PassReport:
    """Keep the first of equal weights and calls; the others' readers read it."""
    first: dict[Hashable, fx.Node] = {}
    caches = {n for n in graph.nodes if n.op == "placeholder" and "cache" in graph.inputs[n.name].kind}
    writes, changed = 0, 0
    for node in graph.nodes:
        if node.op == "output":
            continue
        if graph.is_effect(node):
            writes += 1
            continue
        reads_cache = any(source in caches for source in node.all_input_nodes)
        if reads_cache and node.target in VIEWS:
            caches.add(node)
        key = _key(graph, node)
        if key is None:
            continue
        kept = first.setdefault((key, writes if reads_cache else 0), node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            graph.erase(node)
            changed += 1
    return PassReport(name=NAME, matched=changed, changed=changed)


def _key(graph: Graph, node: fx.Node) -> Hashable | None:
    """Equal for nodes of equal values; None: equal to nothing."""
    if node.op == "placeholder":
        described = graph.inputs[node.name]
        if described.kind != "weight":
            return None
        return graph.recipes[described.name], graph.type_of(node)
    kwargs = sorted(node.kwargs.items())
    return node.target, _hashable(node.args), _hashable([v for pair in kwargs for v in pair])


def _hashable(value: Any) -> Hashable:
    """Tells 1, 1.0 and True apart."""
    if isinstance(value, list | tuple):
        return tuple(_hashable(v) for v in value)
    return value if isinstance(value, fx.Node) else (type(value), repr(value))


PASS = Pass(
    name=NAME,
    kind="graph",
    run=run,
    rewrite="y = f(x); z = f(x) -> y = z = f(x)",
    bound="bit for bit",
    needs=("simplify_views", "fold_norm_weight"),
)
