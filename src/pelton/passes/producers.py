"""Reordering what an activation gives by the rows of the products before it, which costs nothing.

``act(linear(x, G)) * linear(x, U)`` in another order of columns is the same of G and U with their rows in
that order. Rows of any value type move whole.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import fx

from pelton.ir.graph import Graph, argument, op_name
from pelton.ir.recipe import Concat, Recipe, TakeRows, rows
from pelton.passes.folding import name_of
from pelton.passes.pattern import is_weight

#: Ops that treat every column by itself, and their operands.
_ELEMENTWISE = {"activation": 1, "gated_activation": 2}
_SPLITS = ("aten.split.Tensor", "aten.split_with_sizes.default", "aten.chunk.default")


class _Part(NamedTuple):
    """Columns ``start:stop`` of a product."""

    product: fx.Node
    start: int
    stop: int


def reorder_rows(graph: Graph, x: fx.Node, order: Recipe) -> bool:
    """Make ``x`` have its columns in ``order`` by the rows of the weights it comes from; False, with nothing
    changed, where it does not come from products alone, or something else reads them."""
    parts = _parts(graph, x)
    if parts is None:
        return False
    for product in dict.fromkeys(part.product for part in parts):
        ranges = sorted((part.start, part.stop) for part in parts if part.product is product)
        for weight in (product.args[1], argument(product, "bias")):
            if isinstance(weight, fx.Node):
                name = name_of(graph, weight)
                graph.recipes[name] = _reordered(graph.recipes[name], ranges, order)
    return True


def _reordered(recipe: Recipe, ranges: list[tuple[int, int]], order: Recipe) -> Recipe:
    if len(ranges) == 1:
        return TakeRows(recipe, order)
    return Concat(tuple(TakeRows(rows(recipe, start, stop), order) for start, stop in ranges))


def _parts(graph: Graph, x: fx.Node) -> list[_Part] | None:
    """The products that ``x`` is an activation of, where they can be reordered."""
    if len(x.users) != 1 or op_name(x) not in _ELEMENTWISE:
        return None
    parts = []
    for operand in x.args[: _ELEMENTWISE[op_name(x)]]:
        part = _part(operand) if isinstance(operand, fx.Node) and len(operand.users) == 1 else None
        if part is None or not _is_own(graph, part.product):
            return None
        parts.append(part)
    for product in {part.product for part in parts}:
        width = sum(part.stop - part.start for part in parts if part.product is product)
        if width != product.meta["val"].shape[-1]:
            return None
    return parts


def _part(operand: fx.Node) -> _Part | None:
    """The columns of a product that a node is."""
    if op_name(operand) == "linear":
        return _Part(operand, 0, int(operand.meta["val"].shape[-1]))
    if op_name(operand) != "getitem":
        return None
    split, index = operand.args
    if not isinstance(split, fx.Node) or op_name(split) not in _SPLITS or not isinstance(index, int):
        return None
    product = split.args[0]
    if not isinstance(product, fx.Node) or op_name(product) != "linear" or len(product.users) != 1:
        return None
    widths = [int(value.shape[-1]) for value in split.meta["val"]]
    start = sum(widths[:index])
    return _Part(product, start, start + widths[index])


def _is_own(graph: Graph, product: fx.Node) -> bool:
    """Whether nothing but ``product`` reads its weight and bias."""
    given = (product.args[1], argument(product, "bias"))
    return all(w is None or (is_weight(graph, w) and len(w.users) == 1) for w in given)
