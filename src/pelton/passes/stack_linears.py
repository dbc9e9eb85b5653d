"""Several linear layers over one input as one: what fuse_qkv and fuse_gate_mlp have in common.

One product with a taller weight uses the hardware better than several, and the input is quantised once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pelton import nn
from pelton.ir.recipe import Concat, Recipe
from pelton.passes.base import PassContext, PassReport


def fuse_parts(
    model: nn.CausalLM, context: PassContext, *, name: str, kind: type[Any], parts: tuple[str, ...], into: str
) -> PassReport:
    """Stack the layers ``parts`` of every module of class ``kind`` into its attribute ``into``.

    The module's ``packed`` says that its checkpoint has them stacked already, and afterwards that they
    are. Left alone: those, and parts of different value types.
    """
    recipes = nn.collect_recipes(model)
    matched, changed, skipped = 0, 0, []
    for where, module in model.named_modules():
        if not isinstance(module, kind):
            continue
        matched += 1
        if module.packed:
            skipped.append((where, f"{into} is packed in the checkpoint"))
            continue
        stacked = stack_linears({part: getattr(module, part) for part in parts}, where, recipes, context)
        if isinstance(stacked, str):
            skipped.append((where, stacked))
            continue
        for part in parts:
            delattr(module, part)
        setattr(module, into, stacked)
        module.packed = True
        changed += 1
    return PassReport(name=name, matched=matched, changed=changed, skipped=tuple(skipped))


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
        shared = [part for part in parts if f"{prefix}.{part}.{name}" not in recipes]
        if shared:  # what is shared is stored once, by its first name
            return f"another module has the {name} of {', '.join(shared)} too"
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
