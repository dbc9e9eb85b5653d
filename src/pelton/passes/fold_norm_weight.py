"""fold_norm_weight: a norm's weight goes into the products that read it, and becomes ones.

``linear(norm(x) * g, W) = linear(norm(x), W diag(g))``, and a layer norm's bias goes into the products'
biases. It pays where one tensor is normalised twice (attention and MLP side by side, each with its own
norm): those norms are then equal, and ``cse`` makes them one. Elsewhere nothing is saved, so it is left
unless forced. Only for weights that an engine stores as float32: anything narrower would be rounded once
more. The offset that Gemma's checkpoints leave out is part of the recipe, so it goes along.
"""

from __future__ import annotations

from torch import fx

from pelton.dtypes import is_dense
from pelton.ir.graph import Graph, argument, op_name
from pelton.ir.recipe import Full, Product, ScaleColumns, Sum
from pelton.ir.verifier import VIEWS
from pelton.passes.base import Pass, PassContext, PassReport
from pelton.passes.folding import name_of, set_bias, stored
from pelton.passes.pattern import is_weight

NAME = "fold_norm_weight"
NORMS = ("rms_norm", "layer_norm")


def run(graph: Graph, context: PassContext) -> PassReport:
    """Scale the columns of every product that reads one of several norms of a tensor, or when forced any
    norm; the norm's weight is then ones."""
    matched, changed, skipped = 0, 0, []
    for norm in graph.calls:
        if op_name(norm) not in NORMS or not is_weight(graph, norm.args[1]):
            continue
        readers = _readers(norm)
        if not any(op_name(reader) == "linear" for reader in readers):
            continue
        if not (context.forced(NAME) or _normalised_twice(norm)):
            continue
        matched += 1
        why = _fold(graph, context, norm, readers)
        if why is None:
            changed += 1
        else:
            skipped.append((norm.meta["where"] or norm.name, why))
    return PassReport(name=NAME, matched=matched, changed=changed, skipped=tuple(skipped))


def _normalised_twice(norm: fx.Node) -> bool:
    """Whether another norm differs from this one in its weights alone."""
    alike = [user for user in norm.all_input_nodes[0].users if user.target is norm.target]
    return any(n is not norm and n.args[-1] == norm.args[-1] for n in alike)


def _readers(node: fx.Node) -> list[fx.Node]:
    """What reads the node's rows, views and ``take_rows`` looked through."""
    found = []
    for user in node.users:
        through = user.target in VIEWS or (op_name(user) == "take_rows" and user.args[0] is node)
        found += _readers(user) if through else [user]
    return found


def _fold(graph: Graph, context: PassContext, norm: fx.Node, readers: list[fx.Node]) -> str | None:
    gain = norm.args[1]
    assert isinstance(gain, fx.Node)
    shift = argument(norm, "bias") if op_name(norm) == "layer_norm" else None
    for node in filter(None, (gain, shift)):
        if not is_weight(graph, node):
            return f"{node.name} is computed"
        if len(node.users) > 1:
            return f"{name_of(graph, node)} is read elsewhere too"
    width = norm.meta["val"].shape[-1]
    for reader in readers:
        if op_name(reader) != "linear":
            return f"it is read by {op_name(reader)}, not by products alone"
        weight = reader.args[1]
        assert isinstance(weight, fx.Node)
        if not is_weight(graph, weight):
            return f"{weight.name} is computed"
        if why := _why_not(graph, context, weight, width):
            return why
        bias = argument(reader, "bias")
        if shift is not None and bias is not None:
            if not is_weight(graph, bias):
                return f"{bias.name} is computed"
            if len(bias.users) > 1:
                return f"{name_of(graph, bias)} is read elsewhere too"
    for reader in dict.fromkeys(readers):
        _fold_into(graph, reader, gain, shift)
    graph.recipes[name_of(graph, gain)] = Full(width, 1.0)
    if shift is not None:
        graph.recipes[name_of(graph, shift)] = Full(width, 0.0)
    return None


def _why_not(graph: Graph, context: PassContext, weight: fx.Node, width: int) -> str | None:
    name, quant = name_of(graph, weight), stored(graph, context, weight)
    if len(weight.users) > 1:
        return f"{name} is read elsewhere too"
    if not is_dense(quant):
        return f"products have weights stored as {quant} blocks"
    if quant != "float32":
        return f"products have weights stored as {quant}, which would be rounded"
    if weight.meta["val"].shape[1] != width:
        return f"{name} reads several rows of the norm at once"
    return None


def _fold_into(graph: Graph, linear: fx.Node, gain: fx.Node, shift: fx.Node | None) -> None:
    weight = linear.args[1]
    assert isinstance(weight, fx.Node)
    name = name_of(graph, weight)
    recipe = graph.recipes[name]
    if shift is not None:
        bias, product = argument(linear, "bias"), Product(recipe, graph.recipes[name_of(graph, shift)])
        if bias is None:
            set_bias(graph, linear, product)
        else:
            own = name_of(graph, bias)
            graph.recipes[own] = Sum((graph.recipes[own], product))
    graph.recipes[name] = ScaleColumns(recipe, graph.recipes[name_of(graph, gain)])


PASS = Pass(
    name=NAME,
    kind="graph",
    run=run,
    rewrite="linear(norm(x, g), W) -> linear(norm(x, 1), W diag(g)), where x is normalised twice",
    bound="float32 rounding",
    fast=False,
)
