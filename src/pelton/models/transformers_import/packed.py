"""A graph of tensors with packed tokens: the batch dimension is gone and the token dimension is first.

``PackedGraph`` is built call by call. Equal calls are one node. Sizes that are numbers of tokens or
rows are -1 in views, so the graph runs at any size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from pelton.ir.op import get_op
from pelton.ir.recipe import Recipe
from pelton.models.transformers_import.capture import ROWS, TOKENS

aten: Any = torch.ops.aten
DYNAMIC = (TOKENS, ROWS)


@dataclass(frozen=True)
class Value:
    """A tensor of the captured graph as a node of the packed one.

    ``axes``: for each dimension of the captured tensor the node's, or None for a dimension of size 1
    that the node does not have.
    """

    node: fx.Node
    axes: tuple[int | None, ...]


class PackedGraph:
    """``fx.Graph`` of Pelton and ATen ops; ``node.meta``: "val" a meta tensor, "where" a module's name.

    ``get_attr`` nodes are weights (in ``recipes``) or constants (in ``constants``) by their target.
    """

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.recipes: dict[str, Recipe] = {}
        self.constants: dict[str, Any] = {}
        self.where = ""
        """Module that new nodes belong to."""
        self._known: dict[Any, fx.Node] = {}

    def placeholder(self, name: str, val: Any) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta = {"val": val, "where": ""}
        return node

    def weight(self, name: str, val: Any, recipe: Recipe) -> fx.Node:
        """The weight called ``name``, made by ``recipe``."""
        if name not in self.recipes:
            self.recipes[name] = recipe
            plain = torch.empty(val.shape, dtype=val.dtype, device="meta")
            self._known["get_attr", name] = self._attribute(name, plain)
        return self._known["get_attr", name]

    def constant(self, values: Any, name: str = "") -> fx.Node:
        """A float32 constant; equal ones are one."""
        values = values.detach().float().contiguous()
        for known, other in self.constants.items():
            if torch.equal(values, other) if values.shape == other.shape else False:
                return self._known["get_attr", known]
        name = f"constants.{len(self.constants)}"
        self.constants[name] = values
        node = self._known["get_attr", name] = self._attribute(name, values.to("meta"))
        return node

    def _attribute(self, name: str, val: Any) -> fx.Node:
        # Attributes stand before all calls, so that any call may be given any of them.
        first = next((n for n in self.graph.nodes if n.op == "call_function"), None)
        if first is None:
            node = self.graph.create_node("get_attr", name)
        else:
            with self.graph.inserting_before(first):
                node = self.graph.create_node("get_attr", name)
        node.meta = {"val": val, "where": self.where}
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A call at the current insertion point; raises what the op raises on such arguments."""
        key = (target, _frozen(args), _frozen(kwargs))
        if key in self._known and not target._schema.is_mutable:
            return self._known[key]
        val = evaluate_meta(target, args, kwargs)
        node = self.graph.call_function(target, args, kwargs)
        node.meta = {"val": val, "where": self.where}
        self._known[key] = node
        return node

    def view(self, node: fx.Node, shape: tuple[int, ...]) -> fx.Node:
        """``node`` as ``shape``; copied first where its strides do not allow a view."""
        val = node.meta["val"]
        if tuple(val.shape) == tuple(shape):
            return node
        sizes = [-1 if size in DYNAMIC else size for size in shape]
        try:
            return self.call(aten.view.default, node, sizes)
        except RuntimeError:
            return self.call(aten.view.default, self.copy(node), sizes)

    def copy(self, node: fx.Node) -> fx.Node:
        """``node``'s values in contiguous memory."""
        return self.call(torch.ops.pelton.copy.default, node)

    def arrange(self, value: Value, dims: tuple[int, ...]) -> fx.Node:
        """``value`` with exactly its (captured) dimensions ``dims``, in that order; those that the node
        lacks become 1."""
        node, val = value.node, value.node.meta["val"]
        mapped = [value.axes[d] for d in dims]
        kept = [axis for axis in mapped if axis is not None]
        left = [axis for axis in range(val.dim()) if axis not in kept]
        assert all(val.shape[axis] == 1 for axis in left), f"{node} has dimensions besides {dims}"
        if kept != sorted(kept):
            node = self.call(aten.permute.default, node, [*left, *kept])
        sizes = [1 if axis is None else val.shape[axis] for axis in mapped]
        return self.view(node, tuple(sizes))

    def forget(self, weight: fx.Node) -> None:
        """Drop a weight that the node now being replaced is the only one to read."""
        del self.recipes[str(weight.target)]
        self._known.pop(("get_attr", str(weight.target)), None)

    def clean(self) -> None:
        """Erase what nobody reads, weights and constants among it."""
        self.graph.eliminate_dead_code()
        self.graph.lint()

    def finish(self, logits: fx.Node) -> None:
        self.graph.output(logits)
        self.graph.eliminate_dead_code()


def _frozen(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_frozen(v) for v in value)
    if isinstance(value, Mapping):
        return tuple(sorted((k, _frozen(v)) for k, v in value.items()))
    # 1, 1.0 and True are equal but not the same argument.
    return (type(value), value)


def _meta(value: Any) -> Any:
    return fx.node.map_arg(value, lambda node: node.meta["val"])


class Edit:
    """Replacing nodes of a finished ``PackedGraph``; new nodes belong to the module of what they replace."""

    def __init__(self, packed: PackedGraph) -> None:
        self.packed = packed

    @property
    def nodes(self) -> list[fx.Node]:
        """The calls, in order."""
        return [n for n in self.packed.graph.nodes if n.op == "call_function"]

    def replace(self, old: fx.Node, target: Any, *args: Any) -> fx.Node:
        """A call of ``target`` in ``old``'s place; what only ``old`` needed is erased."""
        with self.packed.graph.inserting_before(old):
            new = self.insert(target, *args, where=old.meta["where"])
        self.put(old, new)
        return new

    def put(self, old: fx.Node, new: fx.Node) -> None:
        """``new``, which stands before ``old``'s readers, instead of ``old``."""
        assert new.meta["val"].shape == old.meta["val"].shape, f"{new} is no {old}"
        old.replace_all_uses_with(new)
        self.erase(old)

    def insert(self, target: Any, *args: Any, where: str) -> fx.Node:
        """A new call at the graph's insertion point."""
        node = self.packed.graph.call_function(target, args)
        node.meta = {"val": evaluate_meta(target, args), "where": where}
        return node

    def erase(self, node: fx.Node) -> None:
        """Erase ``node`` and what only it read."""
        inputs = node.all_input_nodes
        self.packed.graph.erase_node(node)
        for other in inputs:
            if not other.users and other.op == "call_function" and not other._erased:
                self.erase(other)


def evaluate_meta(target: Any, args: Any, kwargs: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """What a call gives, on meta tensors."""
    compute = target if target.namespace != "pelton" else get_op(target._opname).shape_rule
    return compute(*_meta(args), **_meta(dict(kwargs)))


def evaluate(node: fx.Node, known: Mapping[fx.Node, Any], constants: Mapping[str, Any]) -> Any:
    """The value of ``node`` from values of nodes before it; ``known`` must cut it off from weights and
    inputs."""
    values = dict(known)

    def value(n: fx.Node) -> Any:
        if n not in values:
            if n.op == "get_attr":
                values[n] = constants[str(n.target)]
            else:
                assert n.op == "call_function", f"{n} has no value"
                values[n] = n.target(*fx.node.map_arg(n.args, value), **fx.node.map_arg(n.kwargs, value))
        return values[n]

    return value(node)
