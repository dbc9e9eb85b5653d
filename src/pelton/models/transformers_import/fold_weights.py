"""What is computed from weights alone becomes part of their recipes: ``1 + weight``, transposes, rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from pelton.ir.recipe import Concat, Recipe, Rows, add_scalar, transpose
from pelton.models.transformers_import.packed import Edit

aten: Any = torch.ops.aten


def fold_weights(edit: Edit) -> None:
    """Fold until nothing is left that a recipe can say."""
    recipes = edit.packed.recipes
    for node in edit.nodes:
        weights = node.all_input_nodes
        if weights and all(w.op == "get_attr" and str(w.target) in recipes for w in weights):
            folded = _fold(node, [recipes[str(w.target)] for w in weights])
            if folded is not None:
                _replace(edit, node, *folded)
        elif node.target is torch.ops.pelton.embedding.default:
            _shift_rows(edit, node)


def _fold(node: fx.Node, recipes: list[Recipe]) -> tuple[str, Recipe] | None:
    """What to call the new weight after its first part, and its recipe."""
    base, args, val = recipes[0], node.args, node.meta["val"]
    if node.target is aten.add.Tensor and len(recipes) == 1 and isinstance(args[1], int | float):
        return "shifted", add_scalar(base, float(args[1]))
    if node.target is aten.t.default:
        return "transposed", transpose(base)
    if node.target is aten.slice.Tensor and args[1] == 0 and len(args) <= 4:
        start = int(args[2] or 0)  # type: ignore[arg-type]
        return f"rows_{start}_{start + val.shape[0]}", Rows(base, start, start + val.shape[0])
    if node.target is aten.cat.default and (len(args) == 1 or args[1] == 0):
        return "joined", Concat(tuple(recipes))
    return None


def _replace(edit: Edit, node: fx.Node, suffix: str, recipe: Recipe) -> None:
    first = node.all_input_nodes[0]
    only = all(len(w.users) == 1 for w in node.all_input_nodes)
    name = str(first.target) if only and suffix == "shifted" else f"{first.target}.{suffix}"
    if only:
        for weight in node.all_input_nodes:
            edit.packed.forget(weight)
    edit.put(node, edit.packed.weight(name, node.meta["val"], recipe))


def _shift_rows(edit: Edit, node: fx.Node) -> None:
    """A table read at ``positions + n`` is its rows from n on, read at ``positions``."""
    ids, table = node.args
    assert isinstance(ids, fx.Node) and isinstance(table, fx.Node)
    shift = ids.args[1] if ids.target is aten.add.Tensor else None
    if not isinstance(shift, int) or shift < 0 or str(table.target) not in edit.packed.recipes:
        return
    rows, width = table.meta["val"].shape
    recipe = Rows(edit.packed.recipes[str(table.target)], shift, rows)
    val = torch.empty((rows - shift, width), device="meta")
    name = f"{table.target}.rows_{shift}_{rows}"
    edit.replace(node, node.target, ids.args[0], edit.packed.weight(name, val, recipe))
