"""attention_bias: biases that are added to q, k or v as heads go into the projection they come from.

``gemm_bias`` sees a vector added to a whole product. Attention adds it to a part of one, seen as heads:
``split(linear(x))[i].view(T, heads, D) + b``. The bias moves up over those views; other parts get zeros.
Then nothing stands between the projection and ``rope_kv_write``. (A bias of the scores themselves, as
ALiBi's, never becomes nodes of a graph: ``paged_attention`` has no such input.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from pelton.ir.graph import Graph, op_name
from pelton.ir.recipe import Concat, Flatten, Full, Recipe
from pelton.ir.verifier import VIEWS
from pelton.passes.base import Pass, PassContext, PassReport
from pelton.passes.folding import name_of
from pelton.passes.gemm_bias import add_to_bias, why_no_bias
from pelton.passes.pattern import Match, Value, call, rewrite, weight

NAME = "attention_bias"


def _origin(node: fx.Node) -> fx.Node:
    while node.target in VIEWS:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _views_a_product(graph: Graph, found: Any) -> bool:
    return isinstance(found, fx.Node) and found.target in VIEWS and op_name(_origin(found)) == "linear"


BIASED = call("binary", Value("part", _views_a_product), weight("bias"), "add", commutes=True)


def run(graph: Graph, context: PassContext) -> PassReport:
    """Rewrite ``view(linear(x, w)) + b`` to ``view(linear(x, w, [0, b, 0]))``."""
    return rewrite(graph, context, NAME, PATTERNS)


def _fold(m: Match) -> str | None:
    graph, part, bias = m.graph, m["part"], m["bias"]
    product = _origin(part)
    rows = product.meta["val"].shape[1]
    inner = tuple(part.meta["val"].shape[1:])
    if tuple(bias.meta["val"].shape) not in (inner, (1, *inner)):
        return f"{name_of(graph, bias)} is not of the shape {list(inner)}"
    columns = _columns(part, rows)
    if columns is None:
        return f"{part.name} is not a range of columns of {product.name}"
    for reader, other in _parts(product):
        theirs = _columns(other, rows)
        if reader is not m.root and (theirs is None or set(theirs) & set(columns)):
            return f"{reader.name} reads the same columns"
    if why := why_no_bias(graph, m.context, product, rows):
        return why
    ends = columns.start, rows - columns.stop
    before, after = ([Full(n, 0.0)] if n else [] for n in ends)
    own: Recipe = graph.recipes[name_of(graph, bias)]
    own = own if bias.meta["val"].dim() == 1 else Flatten(own)
    add_to_bias(graph, product, Concat((*before, own, *after)))
    m.root.replace_all_uses_with(part)
    graph.erase(m.root)
    return None


def _columns(part: fx.Node, rows: int) -> range | None:
    """Which columns of a product with ``rows`` columns a view of it shows, if they are a range."""
    value = part.meta["val"]
    inner = tuple(value.shape[1:])
    dense = torch.empty(inner, device="meta").stride()
    if tuple(value.stride()) != (rows, *dense) or value.storage_offset() >= rows:
        return None
    return range(value.storage_offset(), value.storage_offset() + math.prod(inner))


def _parts(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """(reader, what it reads) of the node's memory, views looked through."""
    for user in node.users:
        if user.target in VIEWS:
            yield from _parts(user)
        else:
            yield user, node


#: What is looked for, and what is done there.
PATTERNS = ((BIASED, _fold),)

PASS = Pass(
    name=NAME,
    kind="graph",
    run=run,
    rewrite="view(linear(x, w)) + b -> view(linear(x, w, [0, b, 0]))",
    bound="float32 rounding",
    needs=("simplify_views",),
)
