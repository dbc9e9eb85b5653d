"""permute_inputs: a weight whose columns are stored in another order is used as stored, its input permuted.

GPTQ's act-order shares scales between columns that are no neighbours. Such a weight is stored with the
columns of each group together and put back in order when it is read (``PutColumns``), which dequantises it.
Here the columns stay, and the product's input takes their order, once for products that share both (q, k
and v; gate and up): ``linear(x, put(S, o)) = linear(take_columns(x, o), S)``. What an activation gives takes
it by the rows of the products before it (down after gate and up), which costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
from torch import fx

from pelton.dtypes import is_dense
from pelton.ir.condition import SameValues
from pelton.ir.graph import Graph, op_name
from pelton.ir.recipe import (
    Concat,
    PadRows,
    PermuteRows,
    PutColumns,
    Recipe,
    Rows,
    Source,
    take_columns,
)
from pelton.kernels.tactic import TensorSpec
from pelton.passes.base import Pass, PassContext, PassReport
from pelton.passes.folding import name_of
from pelton.passes.pattern import is_weight
from pelton.passes.producers import reorder_rows

NAME = "permute_inputs"


def run(graph: Graph, context: PassContext) -> PassReport:
    """Rewrite every product with such a weight, stacked or not."""
    matched, changed, skipped = 0, 0, []
    conditions: list[SameValues] = []
    taken: dict[tuple[fx.Node, bytes], fx.Node] = {}
    for node in graph.calls:
        weight = node.args[1] if op_name(node) == "linear" else None
        if not isinstance(weight, fx.Node) or not is_weight(graph, weight):
            continue
        name = name_of(graph, weight)
        orders = {source: _order(context, source) for source in graph.recipes[name].sources()}
        if not any(orders.values()):
            continue
        matched += 1
        read = {s: np.asarray(context.read(order).data).tobytes() for s, order in orders.items() if order}
        if why := _why_not(graph, context, node, weight, orders, read):
            skipped.append((name, why))
            continue
        first, *others = (order for order in orders.values() if order)
        conditions += [SameValues(a=first, b=other, tolerance=0, why=NAME) for other in others]
        x = node.args[0]
        assert isinstance(x, fx.Node)
        key = x, next(iter(read.values()))
        if key in taken or not reorder_rows(graph, x, first):
            if key not in taken:
                taken[key] = _take(graph, node, x, weight, first)
            node.replace_input_with(x, taken[key])
        graph.recipes[name] = graph.recipes[name].resolve(partial(_as_stored, orders))
        changed += 1
    return PassReport(
        name=NAME,
        matched=matched,
        changed=changed,
        skipped=tuple(skipped),
        conditions=tuple(conditions),
    )


def _order(context: PassContext, source: str) -> Recipe | None:
    """The order in which a checkpoint tensor's columns are put; None where they are not."""
    recipe = context.resolve(Source(source))
    return recipe.order if isinstance(recipe, PutColumns) else None


def _as_stored(orders: Mapping[str, Recipe | None], source: str) -> Recipe:
    order = orders[source]
    assert order is not None
    return take_columns(Source(source), order)


def _why_not(
    graph: Graph,
    context: PassContext,
    node: fx.Node,
    weight: fx.Node,
    orders: dict[str, Recipe | None],
    read: dict[str, bytes],
) -> str | None:
    if not _keeps_columns(graph.recipes[name_of(graph, weight)]):
        return "its columns are computed with"
    if not all(orders.values()) or len(set(read.values())) > 1:
        return "the weights stacked in it have their columns in different orders"
    if len(weight.users) > 1:
        return "it is read elsewhere too"
    as_stored = graph.recipes[name_of(graph, weight)].resolve(partial(_as_stored, orders))
    kept = context.stored_quant(as_stored, 2)
    if is_dense(kept):
        return f"it is stored as {kept}, with its columns in order"
    index = TensorSpec.of_weight("float32", (weight.meta["val"].shape[1],))
    if not context.supports(graph, "take_columns", (node.args[0], index)):
        return "the target has no kernel for take_columns"
    return None


def _keeps_columns(recipe: Recipe) -> bool:
    """Whether a recipe moves whole rows and nothing else."""
    if isinstance(recipe, Source):
        return True
    return isinstance(recipe, Concat | Rows | PadRows | PermuteRows) and all(
        _keeps_columns(base) for base in recipe.bases()
    )


def _take(graph: Graph, node: fx.Node, x: fx.Node, weight: fx.Node, order: Recipe) -> fx.Node:
    """``take_columns(x)`` before ``node``, the index a weight beside the product's."""
    name = name_of(graph, weight).removesuffix("weight") + "input_order"
    index = graph.insert_weight(name, order, weight, (weight.meta["val"].shape[1],))
    index.meta["val"] = index.meta["val"].float()
    return graph.insert_call("take_columns", (x, index), like=node, before=node)


PASS = Pass(
    name=NAME,
    kind="graph",
    run=run,
    rewrite="linear(x, put_columns(w)) -> linear(take_columns(x), w), w in the order it is stored in",
    bound="float32 rounding of the sums' order",
)
