"""A graph as text, and the difference of two."""

from __future__ import annotations

import difflib
from typing import Any

from torch import fx

from pelton.ir.graph import Graph, input_key, op_name


def to_text(graph: Graph) -> str:
    """One line a call, such as ``linear_3 = linear(rms_norm_1, w:layers.0.mlp.up_proj.weight, None)
    -> float32[T, 96]``; weights and step inputs appear where they are used, by their names."""
    lines = []
    for node in graph.calls:
        arguments = [_argument(graph, a) for a in node.args]
        arguments += [f"{k}={_argument(graph, v)}" for k, v in node.kwargs.items()]
        lines.append(f"{node.name} = {op_name(node)}({', '.join(arguments)}) -> {_types(graph, node)}")
    lines.append(f"return {graph.logits.name}")
    return "\n".join(lines) + "\n"


def diff(before: str, after: str) -> str:
    """Unified difference of two texts, without context lines' file headers."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=1, lineterm="")
    return "\n".join(list(lines)[2:])


def _argument(graph: Graph, value: Any) -> str:
    if isinstance(value, fx.Node):
        if value.op != "placeholder":
            return str(value.name)
        described = graph.inputs[value.name]
        return ("w:" if described.kind == "weight" else "") + input_key(described)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_argument(graph, v) for v in value) + "]"
    return repr(value)


def _types(graph: Graph, node: fx.Node) -> str:
    value = node.meta["val"]
    if value is None:
        return "()"
    tensors = value if isinstance(value, list | tuple) else [value]
    shown = [f"{str(t.dtype).removeprefix('torch.')}[{', '.join(map(str, graph.shape(t)))}]" for t in tensors]
    return ", ".join(shown)
