"""Finds products whose columns are cut into parts (stacked q, k, v; gate, up): a split, as passes know it."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from pelton.models.transformers_import.packed import Edit

aten: Any = torch.ops.aten


def match_splits(edit: Edit) -> None:
    """Put one ``split`` for slices that cover all columns of a linear layer's result."""
    for product in edit.nodes:
        if product.target is torch.ops.pelton.linear.default:
            slices = sorted(product.users, key=lambda n: n.args[2] if _is_columns(n) else -1)  # type: ignore[return-value]
            if len(slices) > 1 and all(map(_is_columns, slices)):
                _join(edit, product, slices)


def _is_columns(node: fx.Node) -> bool:
    return (
        node.target is aten.slice.Tensor
        and node.args[1] == 1
        and len(node.args) <= 5
        and (len(node.args) < 5 or node.args[4] == 1)
    )


def _join(edit: Edit, product: fx.Node, slices: list[fx.Node]) -> None:
    sizes = [n.meta["val"].shape[1] for n in slices]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    if [n.args[2] for n in slices] != starts or sum(sizes) != product.meta["val"].shape[1]:
        return
    graph, where = edit.packed.graph, product.meta["where"]
    with graph.inserting_after(product):
        split = graph.call_function(aten.split_with_sizes.default, (product, sizes, 1))
        split.meta = {"val": product.meta["val"].split(sizes, 1), "where": where}
    place = split
    for i, node in enumerate(slices):
        with graph.inserting_after(place):
            part = place = graph.call_function(operator.getitem, (split, i))
        part.meta = {"val": split.meta["val"][i], "where": where}
        node.replace_all_uses_with(part)
        graph.erase_node(node)
