"""Several linear layers over one input as one: what fuse_qkv and fuse_gate_mlp have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pelton import nn
from pelton.ir.recipe import Concat, Recipe
from pelton.passes.base import PassContext


def stack_linears(
    parts: Mapping[str, nn.Linear], prefix: str, recipes: Mapping[str, Recipe], context: PassContext
) -> nn.Linear | str:
    """A layer whose output is the ``parts``' outputs side by side; or why there can be none.

    ``parts`` by attribute name within the module called ``prefix``; ``recipes`` of the whole model.
    Rows of one weight must have one value type, since a packed weight has one layout.
    """
    layers = list(parts.values())
    if len({layer.bias is None for layer in layers}) > 1:
        return "only some of " + ", ".join(parts) + " have a bias"
    stacked = nn.Linear.__new__(nn.Linear)
    torch.nn.Module.__init__(stacked)
    stacked.in_features = layers[0].in_features
    stacked.out_features = sum(layer.out_features for layer in layers)
    stacked.given_recipes = {}
    stacked.bias = None
    for name in ("weight", "bias"):
        if getattr(layers[0], name) is None:
            continue
        sources = {part: recipes[f"{prefix}.{part}.{name}"] for part in parts}
        types = {part: context.quant_of(recipe) for part, recipe in sources.items()}
        if len(set(types.values())) > 1:
            return f"{name} types differ: " + ", ".join(f"{part} {kind}" for part, kind in types.items())
        value = _cat([getattr(layer, name) for layer in layers])
        setattr(stacked, name, torch.nn.Parameter(value, requires_grad=False))
        stacked.given_recipes[name] = Concat(tuple(sources.values()))
    return stacked


def _cat(values: list[Any]) -> Any:
    """The values stacked along dim 0; only the shape of tensors on the meta device."""
    if values[0].is_meta:
        return values[0].new_empty((sum(v.shape[0] for v in values), *values[0].shape[1:]))
    return torch.cat(values)
