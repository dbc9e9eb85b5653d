"""simplify_views: views that look at memory as something before them did are dropped; chains become one.

Views cost nothing when a plan runs: they are strides and offsets. But a transpose and its opposite, or a
reshape there and back, hide that two calls read the same tensor, which is what other passes look for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from pelton.ir.graph import Graph
from pelton.ir.verifier import VIEWS
from pelton.passes.base import Pass, PassContext, PassReport

NAME = "simplify_views"
aten: Any = torch.ops.aten
#: Views whose argument is the whole new shape.
RESHAPES = (aten.view.default, aten.reshape.default)


def run(graph: Graph, context: PassContext) -> PassReport:
    """Replace each view by the earliest tensor that looks the same, or make it a view of that tensor's
    memory where it reshapes a reshaped one."""
    changed = 0
    for node in graph.calls:
        if node.target not in VIEWS or not isinstance(node.meta["val"], torch.Tensor):
            continue
        chain = _viewed(node)
        same = [n for n in chain if graph.type_of(n) == graph.type_of(node)]
        if same:
            node.replace_all_uses_with(same[-1])
            changed += 1
            continue
        source = node.args[0]
        if node.target in RESHAPES and isinstance(source, fx.Node) and source.target in RESHAPES:
            first = source.args[0]
            assert isinstance(first, fx.Node)
            if first.meta["val"].is_contiguous():
                node.update_arg(0, first)
                changed += 1
    for node in reversed(graph.calls):
        if node.target in VIEWS and not node.users:
            graph.erase(node)
    return PassReport(name=NAME, matched=changed, changed=changed)


def _viewed(node: fx.Node) -> list[fx.Node]:
    """What ``node`` is a view of, the nearest first: single tensors only."""
    chain = []
    while node.target in VIEWS:
        node = node.args[0]  # type: ignore[assignment]
        if isinstance(node.meta["val"], torch.Tensor):
            chain.append(node)
        elif node.target not in VIEWS:
            break
    return chain


PASS = Pass(
    name=NAME,
    kind="graph",
    run=run,
    rewrite="view(view(x)) -> view(x), or x where it looks like x; so transpose(transpose(x)) -> x",
    bound="bit for bit",
)
