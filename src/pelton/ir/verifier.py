"""The executable definition of a valid graph, run after tracing and after every pass."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import fx

from pelton.errors import BuildError
from pelton.ir.aten import COMPUTE, is_dense, needs_dense
from pelton.ir.graph import Graph, op_name, op_of
from pelton.ir.op import Op

aten: Any = torch.ops.aten

#: ATen ops that only look at memory: the builder turns them into offsets and strides.
VIEWS = frozenset(
    {
        aten.view.default,
        aten.reshape.default,
        aten.flatten.using_ints,
        aten.unflatten.int,
        aten.transpose.int,
        aten.permute.default,
        aten.expand.default,
        aten.slice.Tensor,
        aten.select.int,
        aten.narrow.default,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.chunk.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.alias.default,
        operator.getitem,
    }
)


def verify(graph: Graph) -> None:
    """Raise ``BuildError`` naming the first node that breaks a rule:

    - only Pelton ops, ``VIEWS`` and ``COMPUTE``; every argument is defined before its use;
    - operands are dense along their last axis, but for ops that take any strides;
    - each Pelton op's recorded result has the dtype and shape that its shape rule gives;
    - ``add`` and ``mul`` neither broadcast tensors nor change the dtype;
    - dynamic dimensions come first, and are named ones;
    - the result is one float32 tensor (N, V).
    """
    seen: set[fx.Node] = set()
    for node in graph.nodes:
        for argument in node.all_input_nodes:
            if argument not in seen:
                _fail(node, f"uses {argument.name} before it is defined")
        seen.add(node)
        if node.op == "placeholder":
            if node.name not in graph.inputs:
                _fail(node, "is an input that the graph does not describe")
            _check_dims(graph, node, node.meta["val"])
        elif node.op == "call_function":
            _check_call(graph, node)
        elif node.op != "output":
            _fail(node, f"is a {node.op}; only placeholders, calls and one output are allowed")
    kind = graph.type_of(graph.logits)
    if kind.dtype != "float32" or len(kind.shape) != 2 or kind.shape[0] != "N":
        _fail(graph.logits, f"is the result and must be float32 (N, V), not {kind.dtype} {kind.shape}")


def effects(graph: Graph) -> list[tuple[int, int]]:
    """The KV writes in order, as (layer, group): the same before and after every pass."""
    found = []
    for node in graph.calls:
        op = op_of(node)
        if op is not None and op.mutates:
            written = graph.inputs[node.args[op.mutates[0]].name]  # type: ignore[union-attr]
            found.append((written.layer, written.group))
    return found


def check_same_effects(before: Iterable[tuple[int, int]], graph: Graph, pass_name: str) -> None:
    """Raise ``BuildError`` when ``pass_name`` dropped, merged or reordered a KV write."""
    if list(before) != effects(graph):
        raise BuildError(f"the pass {pass_name} changed the order or number of KV writes")


def _check_call(graph: Graph, node: fx.Node) -> None:
    op = op_of(node)
    value = node.meta.get("val")
    for argument in node.all_input_nodes if needs_dense(node.target) else ():
        if not all(map(is_dense, _tensors(argument.meta["val"]))):
            _fail(node, f"reads {argument.name}, which is not dense along its last axis; copy it first")
    if op is None:
        if node.target not in VIEWS and node.target not in COMPUTE:
            _fail(node, "is not an op that a plan can run")
        if node.target in COMPUTE:
            _check_elementwise(graph, node)
        _check_dims(graph, node, value)
        return
    got = [(t.dtype, graph.shape(t)) for t in _tensors(value)]
    want = _expected(graph, node, op)
    if got != want:
        _fail(node, f"is recorded as {_types(got)}, its shape rule gives {_types(want)}")
    _check_dims(graph, node, value)


def _expected(graph: Graph, node: fx.Node, op: Op) -> list[tuple[Any, Any]]:
    """Dtypes and shapes that the op's rule gives; layers are alike, so most answers are known."""

    def signature(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return tuple((t.dtype, graph.shape(t)) for t in _tensors(value.meta["val"]))
        return value

    key = (op.name, *map(signature, node.args), *((k, signature(v)) for k, v in node.kwargs.items()))
    if key not in graph.inferred:
        arguments = fx.node.map_arg(node.args, lambda n: n.meta["val"])
        named = fx.node.map_arg(node.kwargs, lambda n: n.meta["val"])
        try:
            result = op.shape_rule(*arguments, **named)
        except Exception as error:
            _fail(node, f"does not fit its op's shape rule: {error}")
        graph.inferred[key] = [(t.dtype, graph.shape(t)) for t in _tensors(result)]
    return graph.inferred[key]


def _types(types: list[tuple[Any, Any]]) -> str:
    return ", ".join(f"{dtype} {shape}" for dtype, shape in types)


def _check_elementwise(graph: Graph, node: fx.Node) -> None:
    value = node.meta["val"]
    for argument in node.args[:2]:
        if isinstance(argument, fx.Node):
            other = argument.meta["val"]
            if graph.shape(other) != graph.shape(value) or other.dtype != value.dtype:
                _fail(node, f"broadcasts or converts {argument.name}; only equal shapes are allowed")
        elif not value.dtype.is_floating_point or node.target is not torch.ops.aten.mul.Tensor:
            _fail(node, f"takes the number {argument} with {value.dtype}; no op does")
    if node.kwargs.get("alpha", 1) != 1:
        _fail(node, "has alpha; multiply first")


def _check_dims(graph: Graph, node: fx.Node, value: Any) -> None:
    for tensor in _tensors(value):
        try:
            shape = graph.shape(tensor)
        except ValueError as error:
            _fail(node, str(error))
        if any(isinstance(d, str) for d in shape[1:]):
            _fail(node, f"has a dynamic dimension that is not the first: {shape}")


def _tensors(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _fail(node: fx.Node, what: str) -> NoReturn:
    where = node.meta.get("where", "")
    raise BuildError(f"graph node {node.name} ({op_name(node)}{', in ' + where if where else ''}) {what}")
