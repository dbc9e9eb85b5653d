"""What the folds have in common: whether a weight can take in a factor, and that only one call reads it."""

from __future__ import annotations

from torch import fx

from pelton.dtypes import is_dense
from pelton.ir.graph import Graph
from pelton.ir.recipe import Recipe, Scale, is_power_of_two
from pelton.passes.base import PassContext
from pelton.passes.pattern import is_weight

#: Types with float32's range: a power of two moves exponents and loses nothing.
WIDE = ("float32", "bfloat16")


def name_of(graph: Graph, weight: fx.Node) -> str:
    """Name of the weight that a placeholder stands for."""
    return graph.inputs[weight.name].name


def stored(graph: Graph, context: PassContext, weight: fx.Node) -> str:
    """Value type in which the engine stores the weight."""
    return context.stored_quant(graph.recipes[name_of(graph, weight)], weight.meta["val"].dim())


def why_not_scaled(graph: Graph, context: PassContext, weight: fx.Node, factor: float) -> str | None:
    """Why ``weight`` cannot take in ``factor``: it would be rounded, or another call reads it too."""
    if not is_weight(graph, weight):
        return f"{weight.name} is computed"
    name, quant = name_of(graph, weight), stored(graph, context, weight)
    if len(weight.users) > 1:
        return f"{name} is read elsewhere too"
    if not is_dense(quant) or not is_dense(context.quant_of(graph.recipes[name])):
        return f"{name} is stored as {quant} blocks"
    if quant == "float32" or (quant in WIDE and is_power_of_two(factor)):
        return None
    return f"{name} is stored as {quant}, where a product with {factor:g} would be rounded"


def scale_weight(graph: Graph, weight: fx.Node, factor: float) -> None:
    """Multiply ``factor`` into the weight's recipe."""
    name = name_of(graph, weight)
    graph.recipes[name] = Scale(graph.recipes[name], factor)


def set_bias(graph: Graph, linear: fx.Node, recipe: Recipe) -> None:
    """Give ``linear`` a new bias in place of the one it has, if any."""
    weight = linear.args[1]
    assert isinstance(weight, fx.Node)
    name = name_of(graph, weight).removesuffix("weight") + "bias"
    while name in graph.recipes:
        name = f"{name}_"
    bias = graph.insert_weight(name, recipe, weight, (weight.meta["val"].shape[0],))
    linear.args = (linear.args[0], weight, bias)
