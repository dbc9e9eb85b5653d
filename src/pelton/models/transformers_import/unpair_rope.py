"""Turns rotations of neighbouring pairs into rotations of halves, which fused ops take.

The rows of the q and k projections are put in the order of halves, so that both rotate the same numbers at
other places; their products, all that attention makes of them, stay as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from pelton.ir.recipe import PermuteRows
from pelton.models.transformers_import.packed import Edit

aten: Any = torch.ops.aten
pelton: Any = torch.ops.pelton


def unpair_rope(edit: Edit) -> None:
    """Rewrite each attention whose q and k are projections, rotated whole and read by nothing else."""
    for write in edit.nodes:
        if write.target is not pelton.kv_write.default:
            continue
        (attention,) = (u for u in write.args[2].users if u.target is pelton.paged_attention.default)  # type: ignore[union-attr]
        rotations = (attention.args[0], write.args[0])
        if all(map(_is_whole_projection, rotations)):
            for rotation in rotations:
                _unpair(edit, rotation)


def _is_whole_projection(node: Any) -> bool:
    if node.target is not pelton.rope_interleaved.default:
        return False
    view, table = node.args
    linear = view.args[0] if view.target is aten.view.default else None
    return (
        linear is not None
        and linear.target is pelton.linear.default
        and all(len(n.users) == 1 for n in (node, view, *linear.all_input_nodes[1:], linear))
        and table.meta["val"].shape[1] == node.meta["val"].shape[2]
    )


def _unpair(edit: Edit, rotation: Any) -> None:
    view, table = rotation.args
    linear, heads = view.args[0], rotation.meta["val"].shape[1]
    x, *weights = linear.args
    halves = [None if w is None else _permuted(edit, w, heads) for w in weights]
    edit.replace(linear, pelton.linear.default, x, *halves)
    edit.replace(rotation, pelton.rope.default, view, table)


def _permuted(edit: Edit, weight: fx.Node, heads: int) -> fx.Node:
    name = str(weight.target)
    owner, _, own = name.rpartition(".")
    recipe = PermuteRows(edit.packed.recipes[name], heads, 2)
    return edit.packed.weight(f"{owner}.halves.{own}", weight.meta["val"], recipe)
