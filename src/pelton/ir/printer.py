"""A graph or a recipe as text, and the difference of two texts."""

from __future__ import annotations

import difflib
import re
from dataclasses import fields
from typing import Any

from torch import fx

from pelton.ir.graph import Graph, input_key, op_name
from pelton.ir.recipe import Recipe, Source


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


def recipe_text(recipe: Recipe) -> str:
    """Such as ``Concat(a.weight, Rows(b.weight, 0, 64))``: sources by their names."""
    if isinstance(recipe, Source):
        return recipe.name
    values = [getattr(recipe, field.name) for field in fields(recipe)]  # type: ignore[arg-type]
    values = [f"{len(v)} numbers" if isinstance(v, tuple) and isinstance(v[0], float) else v for v in values]
    parts = [part for value in values for part in (value if isinstance(value, tuple) else (value,))]
    shown = ", ".join(recipe_text(part) if isinstance(part, Recipe) else str(part) for part in parts)
    return f"{type(recipe).__name__}({shown})"


def diff(before: str, after: str) -> str:
    """Unified difference of two texts, without context lines' file headers."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=1, lineterm="")
    return "\n".join(list(lines)[2:])


def condense(changes: str) -> str:
    """A ``diff`` in which hunks that differ in numbers alone (as those of equal layers) stand once."""
    first: dict[str, str] = {}
    count: dict[str, int] = {}
    for hunk in re.split(r"^(?=@@)", changes, flags=re.MULTILINE):
        # Lines around a change do not count: those of the first and last layer are others'.
        changed = [line for line in hunk.splitlines() if line.startswith(("+", "-"))]
        alike = re.sub(r"_?\d+", "", "\n".join(changed))
        first.setdefault(alike, hunk.rstrip())
        count[alike] = count.get(alike, 0) + 1
    shown = [hunk + (f"\n(and {count[a] - 1} like it)" if count[a] > 1 else "") for a, hunk in first.items()]
    return "\n".join(text for text in shown if text)


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
