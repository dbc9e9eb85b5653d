"""The traced network: a thin layer over ``torch.fx`` that knows dimensions, inputs and effects.

Nodes are ``torch.fx`` nodes: calls of Pelton ops, of the few ATen ops that ``ir.verifier`` allows,
and ``getitem``. ``node.meta["val"]`` is a meta tensor (or several), whose shape, strides and storage
offset say where a view looks. A dynamic dimension has a large prime as its size there, which stands for
its name: ``Graph.dim``.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from pelton.ir.op import Op, get_op, op_of_target
from pelton.ir.recipe import Recipe
from pelton.ir.types import Dim, GraphInput, TensorType


class Graph:
    """A network of one step: logits out, KV caches written on the way.

    ``module``: its ``graph`` is what passes rewrite. ``inputs``: what each placeholder is, by node
    name, in the order of ``run``'s arguments. ``dims``: the size that stands for each dynamic dimension
    in ``meta["val"]`` -> its name; each is a prime above every size of the model.
    ``constants``: values of the inputs of kind "constant", by name. ``recipes``: how each weight is made
    of the Hugging Face model's tensors, by name; passes may replace one.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        inputs: Mapping[str, GraphInput],
        dims: Mapping[int, str],
        constants: Mapping[str, torch.Tensor],
        recipes: Mapping[str, Recipe],
    ) -> None:
        self.module = module
        self.inputs = dict(inputs)
        self.dims = dict(dims)
        self.constants = dict(constants)
        self.recipes = dict(recipes)
        self.inferred: dict[Any, list[tuple[Any, Any]]] = {}
        """What shape rules gave, by op and types of arguments: the verifier's memory."""
        self._smallest_dynamic = min(self.dims)

    @property
    def fx_graph(self) -> fx.Graph:
        return self.module.graph

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """All nodes in execution order, placeholders and the output included."""
        return tuple(self.module.graph.nodes)

    @property
    def calls(self) -> tuple[fx.Node, ...]:
        """Nodes that compute or view something, in execution order."""
        return tuple(n for n in self.module.graph.nodes if n.op == "call_function")

    @property
    def logits(self) -> fx.Node:
        """The node whose value is returned, (N, V) float32."""
        output = next(n for n in reversed(self.module.graph.nodes) if n.op == "output")
        (logits,) = output.args[0]
        return logits

    def input_of(self, node: fx.Node) -> GraphInput:
        """What the placeholder ``node`` stands for."""
        return self.inputs[node.name]

    def op_of(self, node: fx.Node) -> Op | None:
        """The Pelton op that ``node`` calls; None for ATen, ``getitem`` and placeholders."""
        return op_of(node)

    def is_effect(self, node: fx.Node) -> bool:
        """True for nodes that write in place (KV cache): never dropped, merged or reordered."""
        op = op_of(node)
        return op is not None and bool(op.mutates)

    def dim(self, size: int) -> Dim:
        """A size as a number or a named dimension; raises ``ValueError`` on an expression of names."""
        if size < self._smallest_dynamic:
            return size
        if size in self.dims:
            return self.dims[size]
        factors = [name for prime, name in self.dims.items() if size % prime == 0]
        what = f"a multiple of {' x '.join(factors)}" if factors else f"{size}, no size of the model,"
        raise ValueError(f"has a dimension that is {what} and not one of the named dimensions")

    def shape(self, value: Any) -> tuple[Dim, ...]:
        """Named shape of a tensor (such as ``node.meta["val"]``)."""
        return tuple(self.dim(size) for size in value.shape)

    def type_of(self, node: fx.Node, index: int | None = None) -> TensorType:
        """Type of the node's value, or of element ``index`` where it returns several."""
        value = node.meta["val"]
        if index is not None:
            value = value[index]
        return TensorType(
            dtype=str(value.dtype).removeprefix("torch."),
            shape=self.shape(value),
            strides=tuple(int(s) for s in value.stride()),
            offset=int(value.storage_offset()),
        )

    def insert_constant(self, name: str, values: torch.Tensor) -> fx.Node:
        """A new input of kind "constant" with ``values`` (of fixed shape)."""
        self.constants[name] = values
        return self._insert_input(GraphInput(kind="constant", name=name), values)

    def insert_weight(self, name: str, recipe: Recipe, like: fx.Node, shape: tuple[int, ...]) -> fx.Node:
        """A new weight, made by ``recipe`` over checkpoint tensors, of the type of the weight ``like``."""
        assert name not in self.weights(), name
        self.recipes[name] = recipe
        return self._insert_input(GraphInput(kind="weight", name=name), like.meta["val"].new_empty(shape))

    def _insert_input(self, what: GraphInput, value: torch.Tensor) -> fx.Node:
        with self.fx_graph.inserting_before(self.nodes[0]):
            node = self.fx_graph.placeholder(re.sub(r"\W", "_", what.name))
        node.meta = {"val": value.to("meta"), "where": ""}
        self.inputs[node.name] = what
        return node

    def insert_call(self, name: str, args: tuple[Any, ...], *, like: fx.Node, before: fx.Node) -> fx.Node:
        """A new call of the Pelton op ``name`` before ``before``; made in the module that made ``like``."""
        op = get_op(name)
        with self.fx_graph.inserting_before(before):
            node = self.fx_graph.create_node("call_function", op.torch_op, args, name=name)
        values = fx.node.map_arg(args, lambda n: n.meta["val"])
        node.meta = {"val": op.shape_rule(*values), "where": like.meta["where"]}
        return node

    def insert_getitem(self, node: fx.Node, index: int) -> fx.Node:
        """Result ``index`` of ``node``, placed right after it (and after earlier such results)."""
        after = node
        while after.next.target is operator.getitem and after.next.args[0] is node:
            after = after.next
        with self.fx_graph.inserting_after(after):
            item = self.fx_graph.call_function(operator.getitem, (node, index))
        item.meta = {"val": node.meta["val"][index], "where": node.meta["where"]}
        return item

    def infer(self, node: fx.Node) -> None:
        """Record anew what the call ``node`` gives, after its inputs have changed."""
        args = fx.node.map_arg(node.args, lambda n: n.meta["val"])
        kwargs = fx.node.map_arg(node.kwargs, lambda n: n.meta["val"])
        node.meta["val"] = meta_call(node.target, args, kwargs)

    def erase(self, node: fx.Node) -> None:
        """Remove a node that nobody reads."""
        self.fx_graph.erase_node(node)
        self.inputs.pop(node.name, None)

    def weights(self) -> dict[str, fx.Node]:
        """Placeholders of kind "weight" by parameter name."""
        return {i.name: n for n in self.nodes if (i := self.inputs.get(n.name)) and i.kind == "weight"}

    def run(self, arguments: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Run the graph eagerly on the ops' references -> logits.

        ``arguments``: every input by its key (``input_key``); constants are filled in.
        """
        values = []
        for node in self.nodes:
            if node.op == "placeholder":
                described = self.inputs[node.name]
                if described.kind == "constant":
                    values.append(self.constants[described.name])
                else:
                    values.append(arguments[input_key(described)])
        with torch.no_grad():
            (logits,) = self.module(*values)
        return logits


def meta_call(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What ``target`` gives for meta tensors: a Pelton op by its shape rule, anything else by torch.

    Sums and products are worked out here: torch has its own rules for them in Python, which import the
    whole of its compiler (a second) when they are first used.
    """
    op = op_of_target(target)
    if op is not None:
        return op.shape_rule(*args, **kwargs)
    if target in (torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor):
        tensors = [a for a in args[:2] if isinstance(a, torch.Tensor)]
        shape = torch.broadcast_tensors(*tensors)[0].shape
        return tensors[0].new_empty(shape, dtype=torch.result_type(*args[:2]))
    return target(*args, **kwargs)


def input_key(described: GraphInput) -> str:
    """Name of an input for ``Graph.run``: its own, or ``k_cache.LAYER``."""
    if described.kind in ("k_cache", "v_cache"):
        return f"{described.kind}.{described.layer}"
    return described.name


def op_of(node: fx.Node) -> Op | None:
    """The Pelton op that ``node`` calls, or None."""
    return op_of_target(node.target) if node.op == "call_function" else None


def op_name(node: fx.Node) -> str:
    """``rms_norm``, ``aten.add.Tensor``, ``getitem``, or the placeholder's kind of node."""
    if node.op != "call_function":
        return str(node.op)
    op = op_of(node)
    if op is not None:
        return op.name
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target)
    return str(getattr(node.target, "__name__", node.target))


def argument(node: fx.Node, name: str) -> Any:
    """The value of the op's parameter ``name`` at ``node``, its default where it is not given."""
    schema: Sequence[Any] = node.target._schema.arguments  # type: ignore[union-attr]
    for position, parameter in enumerate(schema):
        if parameter.name == name:
            if name in node.kwargs:
                return node.kwargs[name]
            if position < len(node.args):
                return node.args[position]
            return parameter.default_value
    raise KeyError(f"{op_name(node)} has no parameter {name!r}")
