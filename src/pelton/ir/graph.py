"""The traced network: a thin layer over ``torch.fx`` that knows dimensions, inputs and effects.

Nodes are ``torch.fx`` nodes: calls of Pelton ops, of the few ATen ops that ``ir.verifier`` allows,
and ``getitem``. ``node.meta["val"]`` is a fake tensor (or a tuple of them), whose shape, strides and
storage offset say where a view looks; ``Graph.type_of`` reads it with named dimensions.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from pelton.ir.op import Op, get_op
from pelton.ir.types import Dim, GraphInput, TensorType


class Graph:
    """A network of one step: logits out, KV caches written on the way.

    ``module``: its ``graph`` is what passes rewrite. ``inputs``: what each placeholder is, by node
    name, in the order of ``run``'s arguments. ``symbols``: name of each symbolic size.
    ``constants``: values of the inputs of kind "constant", by name.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        inputs: Mapping[str, GraphInput],
        symbols: Mapping[str, str],
        constants: Mapping[str, torch.Tensor],
    ) -> None:
        self.module = module
        self.inputs = dict(inputs)
        self.symbols = dict(symbols)
        self.constants = dict(constants)
        self.inferred: dict[Any, list[tuple[Any, Any]]] = {}
        """What shape rules gave, by op and types of arguments: the verifier's memory."""
        self._dim_names: dict[Any, str] = {}

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

    def dim(self, size: Any) -> Dim:
        """A size as a number or a named dimension; raises ``ValueError`` on an expression of names."""
        if isinstance(size, int):
            return size
        # Printing an expression is slow, and the same few are asked for again and again.
        expression = size.node.expr
        if expression not in self._dim_names:
            name = str(size)
            if name not in self.symbols:
                raise ValueError(f"the size {name} is neither a number nor one of the named dimensions")
            self._dim_names[expression] = self.symbols[name]
        return self._dim_names[expression]

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
        op = op_of(node)
        compute: Any = node.target if op is None else op.shape_rule
        node.meta["val"] = compute(*args, **kwargs)

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


def input_key(described: GraphInput) -> str:
    """Name of an input for ``Graph.run``: its own, or ``k_cache.LAYER``."""
    if described.kind in ("k_cache", "v_cache"):
        return f"{described.kind}.{described.layer}"
    return described.name


def op_of(node: fx.Node) -> Op | None:
    """The Pelton op that ``node`` calls, or None."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return None
    if node.target.namespace != "pelton":
        return None
    return get_op(node.target._opname)


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
