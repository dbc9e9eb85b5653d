"""Which numbers of a recorded graph are dynamic dimensions, and refusing what depends on them otherwise.

The same ``forward`` is recorded at several assignments of sizes to the dynamic dimensions. What a plan
can run is the same in every recording, but for numbers that are in each the size of one and the same
dimension. Anything else is a branch on a size, or arithmetic with one.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from pelton.ir.graph import op_name

aten: Any = torch.ops.aten

Sizes = Mapping[str, int]
"""Size of each dynamic dimension in one recording."""


class DependsOnSizes(Exception):
    """What depends on the step's sizes and where, as the end of a sentence."""


def example_sizes(dims: Sequence[str], largest: int) -> list[Sizes]:
    """Sizes for each recording, the main one first.

    There every dimension is a prime of its own above ``largest``, the largest size of the model: no
    static size equals or contains one, and a view that regroups one does not divide. The others reverse
    their order and go down to the smallest steps, so that no comparison of sizes comes out alike in all.
    """
    primes = _primes_above(max(largest, 1 << 20), len(dims))
    small = [2 + 3 * i for i in range(len(dims))]
    one = [2 if dim == "B+1" else 1 for dim in dims]
    return [dict(zip(dims, sizes, strict=True)) for sizes in (primes, primes[::-1], small, small[::-1], one)]


def _primes_above(n: int, count: int) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        n += 1
        if all(n % d for d in range(2, math.isqrt(n) + 1)):
            found.append(n)
    return found


class _Named(str):
    """A number that is the size of the dimension of this name."""


def generalise(recordings: Sequence[tuple[Sizes, Sequence[fx.Node]]]) -> None:
    """Make the calls of the first recording hold at any size, given the same ``forward`` at others.

    Raises ``DependsOnSizes`` where the others are not the same calls, or a size is an argument that the
    op cannot infer.
    """
    sizes = [sizes for sizes, _ in recordings]
    places = {node: i for _, nodes in recordings for i, node in enumerate(nodes)}
    for calls in zip(*(nodes for _, nodes in recordings), strict=False):
        node = calls[0]
        targets, arguments = zip(*(_as_call_of(node, n) for n in calls), strict=True)
        other = next((n for n, target in zip(calls, targets, strict=True) if target is not node.target), None)
        if other is not None:
            raise DependsOnSizes(
                f"{_where(node)} calls {op_name(node)} at some sizes of a step and {op_name(other)} at others"
            )
        args, kwargs = _unify(arguments, sizes, node, places)
        shapes = _unify([_shapes(n) for n in calls], sizes, node, places)
        node.args = _infer_sizes(node, args, shapes)
        if name := _first_named((node.args, kwargs)):
            raise DependsOnSizes(f"{_where(node)} passes the step's {name} to {op_name(node)}")
    shortest = min(len(nodes) for _, nodes in recordings)
    extra = next((nodes[shortest] for _, nodes in recordings if len(nodes) > shortest), None)
    if extra is not None:
        raise DependsOnSizes(f"{_where(extra)} calls {op_name(extra)} at some sizes of a step only")


def _as_call_of(node: fx.Node, other: fx.Node) -> tuple[Any, tuple[Any, Any]]:
    """Target and arguments of ``other``, written as a call of ``node``'s target where it is the same sum or
    product: with one row in a step, what broadcasts in other steps has equal shapes."""
    kind = {aten.add.Tensor: "add", aten.mul.Tensor: "mul"}.get(other.target)
    if node.target is torch.ops.pelton.binary.default and kind and not other.kwargs:
        return node.target, ((*other.args, kind), other.kwargs)
    return other.target, (other.args, other.kwargs)


def _unify(
    values: Sequence[Any], sizes: Sequence[Sizes], node: fx.Node, places: Mapping[fx.Node, int]
) -> Any:
    """The value that all recordings share, with ``_Named`` for the size of a dimension.

    ``places``: position of each call; step inputs and weights are the same by name.
    """
    first = values[0]
    if all(type(v) is type(first) for v in values):
        if isinstance(first, fx.Node):
            if len({places.get(v, v.name) for v in values}) == 1:
                return first
        elif isinstance(first, list | tuple):
            if all(len(v) == len(first) for v in values):
                parts = zip(*values, strict=True)
                return type(first)(_unify(part, sizes, node, places) for part in parts)
        elif isinstance(first, dict):
            if all(v.keys() == first.keys() for v in values):
                return {key: _unify([v[key] for v in values], sizes, node, places) for key in first}
        elif all(v == first for v in values):
            return first
        elif isinstance(first, int):
            for name in sizes[0]:
                if all(v == s[name] for v, s in zip(values, sizes, strict=True)):
                    return _Named(name)
    raise DependsOnSizes(
        f"{_where(node)} makes {op_name(node)} depend on the step's sizes, and not as a dimension of its own"
    )


def _infer_sizes(node: fx.Node, args: tuple[Any, ...], shapes: list[Any]) -> tuple[Any, ...]:
    """``args`` with sizes left to the op where it can work them out: -1 in a view, no end in a slice."""
    if node.target in (aten.view.default, aten.reshape.default) and _first_named(args[1]):
        return (args[0], [-1 if isinstance(d, _Named) else d for d in shapes[0]])
    if node.target is aten.expand.default and isinstance(args[1][0], _Named):
        # -1 keeps a size, and cannot make one of what had 1.
        kept = args[0].meta["val"].shape[:1] == node.meta["val"].shape[:1]
        return (args[0], [-1, *args[1][1:]], *args[2:]) if kept else args
    if node.target is aten.slice.Tensor and len(args) == 4 and isinstance(args[3], _Named) and not args[2]:
        return (*args[:3], sys.maxsize)
    return args


def _first_named(value: Any) -> str | None:
    if isinstance(value, _Named):
        return value
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return next((name for part in parts if (name := _first_named(part))), None)


def _shapes(node: fx.Node) -> list[tuple[int, ...]]:
    value = node.meta["val"]
    values = value if isinstance(value, list | tuple) else [value]
    return [tuple(v.shape) for v in values if isinstance(v, torch.Tensor)]


def _where(node: fx.Node) -> str:
    return str(node.meta["where"]) or "forward"
