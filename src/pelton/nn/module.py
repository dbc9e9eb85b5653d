"""Modules whose parameters know how they are made from a checkpoint: the weight recipes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from pelton.errors import CheckpointError
from pelton.ir.blocks import dequantize
from pelton.ir.evaluate import evaluate
from pelton.ir.recipe import Recipe, Source
from pelton.ir.tensors import HostTensor


class Module(torch.nn.Module):
    """A ``torch.nn.Module`` that may say where its parameters come from.

    The module tree mirrors the checkpoint's (Hugging Face) names, so a parameter's recipe is by
    default ``Source(its own name)``. A class overrides ``recipe`` where the checkpoint differs.
    """

    given_recipes: Mapping[str, Recipe] = MappingProxyType({})
    """Recipes of own parameters that a model pass put together; they go before ``recipe``."""

    def recipe(self, param_name: str, source: Recipe) -> Recipe:
        """How this module's own parameter ``param_name`` ("weight", "bias") is made.

        ``source`` is the default: the checkpoint tensor of the parameter's name.
        """
        return source


def collect_recipes(model: torch.nn.Module, source: Callable[[str], Recipe] = Source) -> dict[str, Recipe]:
    """Recipe of every parameter by name; a parameter shared by two modules appears once.

    ``source`` gives the recipe of a Hugging Face tensor by name (``Checkpoint.source``). A shared
    parameter has its first name, as in ``model.named_parameters()``: with tied embeddings the
    language-model head has no entry of its own.
    """
    recipes: dict[str, Recipe] = {}
    source_name: Callable[[str], str] = getattr(model, "source_name", lambda name: name)
    for full_name, _ in model.named_parameters():
        prefix, _, name = full_name.rpartition(".")
        owner = model.get_submodule(prefix)
        recipe: Recipe = source(source_name(full_name))
        if isinstance(owner, Module):
            recipe = owner.given_recipes.get(name) or owner.recipe(name, recipe)
        recipes[full_name] = recipe
    return recipes


def load_weights(
    model: torch.nn.Module,
    read: Callable[[str], HostTensor],
    source: Callable[[str], Recipe] = Source,
) -> None:
    """Fill a model made on the meta device, in float32, so that it runs eagerly.

    ``read`` and ``source``: a ``Checkpoint``'s; block types are dequantised. Raises
    ``CheckpointError`` where a tensor made by its recipe has not the parameter's shape.
    """
    for name, recipe in collect_recipes(model, source).items():
        parameter = model.get_parameter(name)
        value = torch.from_numpy(dequantize(evaluate(recipe, read)))
        if value.shape != parameter.shape:
            raise CheckpointError(
                f"{', '.join(recipe.sources())} gives {name} the shape {tuple(value.shape)}; "
                f"the model's configuration asks for {tuple(parameter.shape)}"
            )
        replace_parameter(model, parameter, torch.nn.Parameter(value, requires_grad=False))


def replace_parameter(model: torch.nn.Module, old: Any, new: Any) -> None:
    """Put ``new`` wherever ``model`` holds ``old``, so that tied parameters stay tied."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is old:
                module._parameters[name] = new
