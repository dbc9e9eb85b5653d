"""Packing ops that only look at memory, and joins."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from pelton.models.transformers_import.capture import ROWS, TOKENS
from pelton.models.transformers_import.pack_base import (
    CannotPack,
    as_value,
    handles,
    not_dynamic,
    order,
    placed,
    shape_text,
)
from pelton.models.transformers_import.packed import PackedGraph, Value

aten: Any = torch.ops.aten


@handles(
    aten.contiguous.default,
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.dropout.default,
    aten.native_dropout.default,
    aten.lift_fresh_copy.default,
    aten.to.device,
    aten.to.dtype,
    aten.to.dtype_layout,
    aten._to_copy.default,
    aten.type_as.default,
)
def same(graph: PackedGraph, val: Any, x: Value, *_: Any, **__: Any) -> Value:
    """Conversions between floating-point types are none: the engine computes in float32."""
    before = x.node.meta["val"].dtype
    if before.is_floating_point == val.dtype.is_floating_point:
        return x
    if not val.dtype.is_floating_point:
        raise CannotPack(f"makes {val.dtype} of {before}")
    return Value(graph.call(aten.to.dtype, x.node, torch.float32), x.axes)


@handles(aten.unsqueeze.default)
def unsqueeze(graph: PackedGraph, val: Any, x: Value, dim: int) -> Value:
    dim %= len(x.axes) + 1
    return Value(x.node, (*x.axes[:dim], None, *x.axes[dim:]))


@handles(aten.squeeze.dim, aten.squeeze.default)
def squeeze(graph: PackedGraph, val: Any, x: Value, dim: int | None = None) -> Value:
    return reshape(graph, val, x)


@handles(aten.transpose.int, aten.swapaxes.default)
def transpose(graph: PackedGraph, val: Any, x: Value, a: int, b: int) -> Value:
    axes = list(x.axes)
    axes[a], axes[b] = axes[b], axes[a]
    return Value(x.node, tuple(axes))


@handles(aten.t.default, aten.numpy_T.default)
def t(graph: PackedGraph, val: Any, x: Value) -> Value:
    return Value(x.node, x.axes[::-1])


@handles(aten.permute.default)
def permute(graph: PackedGraph, val: Any, x: Value, dims: Sequence[int]) -> Value:
    return Value(x.node, tuple(x.axes[d] for d in dims))


@handles(aten.expand.default, aten.expand_as.default)
def expand(graph: PackedGraph, val: Any, x: Value, *_: Any, **__: Any) -> Value:
    axes = (None,) * (val.dim() - len(x.axes)) + x.axes
    sizes = [1 if axis is None else x.node.meta["val"].shape[axis] for axis in axes]
    if sizes != list(val.shape):
        raise CannotPack(f"repeats a tensor to {shape_text(val.shape)}")
    return Value(x.node, axes)


@handles(
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.view_as.default,
)
def reshape(graph: PackedGraph, val: Any, x: Value, *_: Any, **__: Any) -> Value:
    """Dimensions split and merged, each group of them in its place in the packed tensor."""
    own = x.node.meta["val"].shape
    old = [(axis, own[axis]) for axis in x.axes if axis is not None and own[axis] != 1]
    new = [(dim, size) for dim, size in enumerate(val.shape) if size != 1]
    groups = _groups([size for _, size in old], [size for _, size in new])
    order = sorted(axis for axis, _ in old)
    by_first: dict[int, list[int]] = {}
    for left, right in groups:
        axes = [old[i][0] for i in left]
        dims = [new[i][0] for i in right]
        places = [order.index(axis) for axis in axes]
        if places != list(range(places[0], places[0] + len(places))):
            # The packed tensor has them in another order: put it in the captured one first.
            straight = graph.copy(graph.arrange(x, tuple(range(len(x.axes)))))
            return reshape(graph, val, Value(straight, tuple(range(len(x.axes)))))
        by_first[places[0]] = dims
    dims_in_order = [dim for place in sorted(by_first) for dim in by_first[place]]
    node = graph.view(x.node, tuple(val.shape[dim] for dim in dims_in_order))
    axes_of = {dim: axis for axis, dim in enumerate(dims_in_order)}
    return Value(node, tuple(axes_of.get(dim) for dim in range(val.dim())))


def _groups(old: list[int], new: list[int]) -> list[tuple[list[int], list[int]]]:
    """Smallest runs of indices of equal products."""
    groups, i, j = [], 0, 0
    while i < len(old) or j < len(new):
        left, right = [i], [j]
        a, b = old[i], new[j]
        i, j = i + 1, j + 1
        while a != b:
            if a < b:
                a, i = a * old[i], i + 1
                left.append(i - 1)
            else:
                b, j = b * new[j], j + 1
                right.append(j - 1)
        if (a % TOKENS == 0 or a % ROWS == 0) and (len(left) > 1 or len(right) > 1):
            raise CannotPack("merges tokens with another dimension")
        groups.append((left, right))
    return groups


@handles(aten.slice.Tensor)
def slice_(
    graph: PackedGraph, val: Any, x: Value, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Value:
    axis = x.axes[dim]
    size = 1 if axis is None else x.node.meta["val"].shape[axis]
    if val.shape[dim] == size and step == 1:
        return x
    not_dynamic(size, "takes a part of the tokens")
    return Value(graph.call(aten.slice.Tensor, x.node, axis, start or 0, end, step), x.axes)


@handles(aten.narrow.default)
def narrow(graph: PackedGraph, val: Any, x: Value, dim: int, start: int, length: int) -> Value:
    return slice_(graph, val, x, dim, start, start + length)


@handles(aten.select.int)
def select(graph: PackedGraph, val: Any, x: Value, dim: int, index: int) -> Value:
    dim %= len(x.axes)
    axis, rest = x.axes[dim], x.axes[:dim] + x.axes[dim + 1 :]
    if axis is None:
        return Value(x.node, rest)
    not_dynamic(x.node.meta["val"].shape[axis], "takes one of the tokens")
    node = graph.call(aten.select.int, x.node, axis, index)
    return Value(node, tuple(a if a is None or a < axis else a - 1 for a in rest))


@handles(aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default, aten.split.sizes)
def split(graph: PackedGraph, val: Any, x: Value, sizes: Any, dim: int = 0) -> list[Value]:
    parts, start = [], 0
    for part in val:
        parts.append(slice_(graph, part, x, dim, start, start + part.shape[dim]))
        start += part.shape[dim]
    return parts


@handles(aten.unbind.int)
def unbind(graph: PackedGraph, val: Any, x: Value, dim: int = 0) -> list[Value]:
    return [select(graph, part, x, dim, i) for i, part in enumerate(val)]


@handles(operator.getitem)
def getitem(graph: PackedGraph, val: Any, parts: Sequence[Value], index: int) -> Value:
    return parts[index]


@handles(aten.cat.default, aten.concat.default)
def cat(graph: PackedGraph, val: Any, parts: Sequence[Any], dim: int = 0) -> Value:
    values = [as_value(graph, p) for p in parts]
    dims = _with(order(val.shape, values), dim % val.dim())
    if val.shape[dim] in (TOKENS, ROWS):
        raise CannotPack("joins tokens")
    nodes = [graph.arrange(v, dims) for v in values]
    return placed(graph.call(aten.cat.default, nodes, dims.index(dim % val.dim())), dims, val)


def _with(dims: tuple[int, ...], dim: int) -> tuple[int, ...]:
    """``dims`` and ``dim``, along which tensors are joined: it may have size 1 in all of them, and then
    no packed tensor has it."""
    if dim in dims:
        return dims
    place = max((i for i, d in enumerate(dims) if d < dim), default=-1) + 1
    return (*dims[:place], dim, *dims[place:])


@handles(aten.stack.default)
def stack(graph: PackedGraph, val: Any, parts: Sequence[Any], dim: int = 0) -> Value:
    dim %= val.dim()
    values = [unsqueeze(graph, None, as_value(graph, p), dim) for p in parts]
    dims = _with(order(val.shape, values), dim)
    nodes = [graph.arrange(v, dims) for v in values]
    return placed(graph.call(aten.cat.default, nodes, dims.index(dim)), dims, val)


@handles(aten.repeat_interleave.self_int)
def repeat_interleave(graph: PackedGraph, val: Any, x: Value, repeats: int, dim: int | None = None) -> Value:
    axis = None if dim is None else x.axes[dim]
    if axis is None:
        raise CannotPack("repeats a dimension of size 1")
    not_dynamic(val.shape[dim], "repeats tokens")
    return Value(graph.call(aten.repeat_interleave.self_int, x.node, repeats, axis), x.axes)
