"""constant_folding: what depends on constants alone is computed at build; a product with 1 is its operand.

Constants are buffers of the model, such as RoPE's frequencies. Weights are no constants: what is done to
one belongs into its recipe (``fold_scaling``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from pelton.ir.graph import Graph
from pelton.ir.verifier import VIEWS
from pelton.passes.base import Pass, PassContext, PassReport

NAME = "constant_folding"
MUL = torch.ops.aten.mul.Tensor


def run(graph: Graph, context: PassContext) -> PassReport:
    """Replace calls of constants by new constants, and ``x * 1`` by ``x``."""
    changed, skipped = 0, []
    values: dict[fx.Node, Any] = {}
    for node in graph.calls:
        if node.target is MUL and not isinstance(node.args[1], fx.Node) and node.args[1] == 1:
            node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
            graph.erase(node)
            changed += 1
        elif (value := _value(graph, node, values)) is not None:
            values[node] = value
    for node, value in values.items():
        # What only other folded calls read goes with them; a view of a constant costs nothing.
        if all(user in values for user in node.users) or _views_a_constant(graph, node):
            continue
        if not isinstance(value, torch.Tensor) or value.dtype != torch.float32:
            skipped.append((node.name, "constants are single float32 tensors"))
            continue
        constant = graph.insert_constant(f"{NAME}.{node.name}", value.contiguous())
        node.replace_all_uses_with(constant)
        changed += 1
    for node in reversed(graph.calls):
        if node in values and not node.users:
            graph.erase(node)
    return PassReport(name=NAME, matched=changed + len(skipped), changed=changed, skipped=tuple(skipped))


def _value(graph: Graph, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    """What ``node`` gives when all that it reads is known; else None."""
    if graph.is_effect(node) or not node.all_input_nodes:
        return None
    known = {}
    for source in node.all_input_nodes:
        described = graph.inputs.get(source.name)
        if source in values:
            known[source] = values[source]
        elif described is not None and described.kind == "constant":
            known[source] = graph.constants[described.name]
        else:
            return None
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: known[n])
    with torch.no_grad():
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _views_a_constant(graph: Graph, node: fx.Node) -> bool:
    while node.target in VIEWS:
        node = node.args[0]  # type: ignore[assignment]
    return bool(node.op == "placeholder")


PASS = Pass(
    name=NAME,
    kind="graph",
    run=run,
    rewrite="f(constants) -> constant; x * 1 -> x",
    bound="bit for bit",
)
