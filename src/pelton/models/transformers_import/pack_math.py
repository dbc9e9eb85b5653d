"""Packing ops that compute: element by element, along the last dimension, with weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pelton.models.transformers_import.pack_base import HANDLERS, CannotPack, as_value, handles, order, placed
from pelton.models.transformers_import.packed import PackedGraph, Value

aten: Any = torch.ops.aten
pelton: Any = torch.ops.pelton


def _unary(target: Any) -> Callable[..., Value]:
    def handler(graph: PackedGraph, val: Any, x: Value, *args: Any, **kwargs: Any) -> Value:
        if not val.dtype.is_floating_point:
            raise CannotPack(f"computes with {val.dtype}")
        return Value(graph.call(target, x.node, *args, **kwargs), x.axes)

    return handler


for _target in (
    aten.abs.default, aten.clamp.default, aten.clamp_min.default, aten.cos.default, aten.exp.default,
    aten.gelu.default, aten.log.default, aten.neg.default, aten.pow.Tensor_Scalar, aten.reciprocal.default,
    aten.relu.default, aten.rsqrt.default, aten.rsub.Scalar, aten.sigmoid.default, aten.silu.default,
    aten.sin.default, aten.sqrt.default, aten.square.default, aten.tanh.default,
):  # fmt: skip
    HANDLERS[_target] = _unary(_target)


def _binary(target: Any) -> Callable[..., Value]:
    def handler(graph: PackedGraph, val: Any, x: Any, y: Any, *, alpha: float = 1, **kwargs: Any) -> Any:
        x, y = number(x), number(y)
        if alpha != 1:
            y = y * alpha if not isinstance(y, Value) else binary(graph, val, aten.mul.Tensor, y, alpha)
        if not isinstance(x, Value) and not isinstance(x, torch.Tensor):
            # A number first: the same with the tensor first, where there is such.
            if target in (aten.mul.Tensor, aten.add.Tensor):
                x, y = y, x
            else:
                x = torch.tensor(float(x))
        return binary(graph, val, target, x, y)

    return handler


def number(x: Any) -> Any:
    """A known tensor of one value as a number."""
    return x.item() if isinstance(x, torch.Tensor) and x.numel() == 1 else x


def binary(graph: PackedGraph, val: Any, target: Any, x: Any, y: Any) -> Value:
    """``target`` of two tensors that broadcast, or of a tensor and a number."""
    x = as_value(graph, x)
    if not isinstance(y, Value | torch.Tensor):
        neutral = (1, 1.0) if target in (aten.mul.Tensor, aten.div.Tensor) else (0, 0.0)
        return x if y in neutral else Value(graph.call(target, x.node, y), x.axes)
    x, y = (Value(v.node, (None,) * (val.dim() - len(v.axes)) + v.axes) for v in (x, as_value(graph, y)))
    dims = order(val.shape, (x, y))
    nodes = []
    for v in (x, y):
        needed = next((i for i, d in enumerate(dims) if v.axes[d] is not None), len(dims) - 1)
        nodes.append(graph.arrange(v, dims[needed:]))
    return placed(graph.call(target, *nodes), dims, val)


for _target in (
    aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.pow.Tensor_Tensor,
    aten.maximum.default, aten.minimum.default,
):  # fmt: skip
    HANDLERS[_target] = _binary(_target)


def last(x: Value) -> int:
    """The packed dimension of ``x``'s last one, which must be its last."""
    axis = x.axes[-1]
    if axis is None or axis != x.node.meta["val"].dim() - 1:
        raise CannotPack("works along a dimension that is not the last in memory")
    return axis


def _reduce(target: Any) -> Callable[..., Value]:
    def handler(
        graph: PackedGraph, val: Any, x: Value, dims: Sequence[int], keepdim: bool = False, **_: Any
    ) -> Value:
        dims = [dims] if isinstance(dims, int) else list(dims)
        if [d % len(x.axes) for d in dims] != [len(x.axes) - 1]:
            raise CannotPack("reduces dimensions other than the last")
        last(x)
        return Value(graph.call(target, x.node, [-1], True), x.axes if keepdim else x.axes[:-1])

    return handler


for _target in (aten.mean.dim, aten.sum.dim_IntList, aten.amax.default):
    HANDLERS[_target] = _reduce(_target)


@handles(aten.softmax.int, aten._softmax.default)
def softmax(graph: PackedGraph, val: Any, x: Value, dim: int, *_: Any) -> Value:
    if dim % len(x.axes) != len(x.axes) - 1:
        raise CannotPack("works along a dimension that is not the last")
    return Value(graph.call(aten.softmax.int, x.node, last(x)), x.axes)


@handles(aten.layer_norm.default)
def layer_norm(
    graph: PackedGraph, val: Any, x: Value, shape: Sequence[int], weight: Any = None, bias: Any = None,
    eps: float = 1e-5, *_: Any,
) -> Value:  # fmt: skip
    if len(shape) != 1:
        raise CannotPack("normalises several dimensions")
    last(x)
    w, b = (None if p is None else as_value(graph, p).node for p in (weight, bias))
    return Value(graph.call(pelton.layer_norm.default, x.node, w, b, eps), x.axes)


@handles(aten.rms_norm.default)
def rms_norm(
    graph: PackedGraph, val: Any, x: Value, shape: Sequence[int], weight: Any = None, eps: float | None = None
) -> Value:
    if len(shape) != 1:
        raise CannotPack("normalises several dimensions")
    last(x)
    w = as_value(graph, torch.ones(shape[0]) if weight is None else weight).node
    return Value(
        graph.call(
            pelton.rms_norm.default, x.node, w, torch.finfo(torch.float32).eps if eps is None else eps
        ),
        x.axes,
    )


@handles(aten.linear.default)
def linear(graph: PackedGraph, val: Any, x: Value, weight: Any, bias: Any = None) -> Value:
    if x.node.meta["val"].dim() != 2:
        raise CannotPack("multiplies a matrix with a tensor of more than two dimensions")
    last(x)
    w = as_value(graph, weight)
    if w.axes == (1, 0):
        w = Value(graph.call(aten.t.default, w.node), (0, 1))
    b = None if bias is None else as_value(graph, bias).node
    return Value(graph.call(pelton.linear.default, x.node, w.node, b), x.axes)


@handles(aten.addmm.default)
def addmm(graph: PackedGraph, val: Any, bias: Value, x: Value, weight: Value) -> Value:
    return linear(graph, val, x, Value(weight.node, weight.axes[::-1]), bias)


@handles(aten.matmul.default, aten.mm.default, aten.bmm.default)
def matmul(graph: PackedGraph, val: Any, x: Any, y: Any) -> Value:
    """A product with a weight, or an outer product (positions with frequencies)."""
    x, y = as_value(graph, x), as_value(graph, y)
    if len(y.axes) == 2 and y.node.op == "get_attr":
        return linear(graph, val, x, Value(y.node, y.axes[::-1]))
    if x.axes[-1] is None and y.axes[-2] is None:
        column = Value(x.node, (*x.axes[:-1], None))
        row = Value(y.node, (*y.axes[:-2], None, y.axes[-1]))
        return binary(graph, val, aten.mul.Tensor, column, row)
    raise CannotPack("multiplies two tensors that depend on the tokens: is this attention by itself?")


@handles(aten.embedding.default)
def embedding(graph: PackedGraph, val: Any, table: Any, ids: Value, *_: Any) -> Value:
    if ids.node.meta["val"].dim() != 1:
        raise CannotPack("looks up more than one row a token")
    node = graph.call(pelton.embedding.default, ids.node, as_value(graph, table).node)
    return Value(node, (*ids.axes, 1))


@handles(aten.index.Tensor)
def index(graph: PackedGraph, val: Any, x: Any, indices: Sequence[Any]) -> Value:
    """Rows of a table by position, or the rows whose logits are wanted."""
    where = [dim for dim, i in enumerate(indices) if i is not None]
    if len(where) != 1 or not isinstance(indices[where[0]], Value):
        raise CannotPack("picks elements by several indices")
    rows = indices[where[0]]
    if isinstance(x, torch.Tensor) and where == [0] and x.dim() == 2:
        return embedding(graph, val, x, rows)
    x = as_value(graph, x)
    if x.axes[where[0]] != 0 or x.node.meta["val"].dim() != 2 or rows.axes != (0,):
        raise CannotPack("picks elements other than whole rows")
    return Value(graph.call(pelton.take_rows.default, x.node, rows.node), x.axes)


@handles(aten.index_select.default)
def index_select(graph: PackedGraph, val: Any, x: Any, dim: int, rows: Value) -> Value:
    return index(graph, val, x, [None] * dim + [rows])
