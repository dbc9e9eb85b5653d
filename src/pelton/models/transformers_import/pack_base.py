"""How each captured ATen op is packed: ``HANDLERS[op](graph, val, *args, **kwargs) -> Value``.

``val`` is the captured result, whose shape says what broadcasting and reshaping gave. Arguments are the
op's, tensors as ``Value``s; a tensor that is known is a ``torch.Tensor``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from pelton.models.transformers_import.capture import ROWS, TOKENS
from pelton.models.transformers_import.packed import PackedGraph, Value

F = TypeVar("F", bound=Callable[..., Any])
HANDLERS: dict[Any, Callable[..., Any]] = {}


class CannotPack(Exception):
    """Why an op cannot be packed, as a sentence's end."""


def handles(*targets: Any) -> Callable[[F], F]:
    """Decorator: the function packs these ops."""

    def register(function: F) -> F:
        HANDLERS.update(dict.fromkeys(targets, function))
        return function

    return register


def as_value(graph: PackedGraph, x: Any) -> Value:
    """``x``, or a constant node for a known tensor, without its dimensions of size 1."""
    if isinstance(x, Value):
        return x
    kept = [dim for dim, size in enumerate(x.shape) if size != 1]
    return Value(
        graph.constant(x.squeeze()), tuple(kept.index(d) if d in kept else None for d in range(x.dim()))
    )


def order(shape: Any, values: Sequence[Value]) -> tuple[int, ...]:
    """The captured dimensions that ``values`` have, in the order of the first value that has them all,
    else tokens first."""
    dims = [d for d, size in enumerate(shape) if size != 1 and any(v.axes[d] is not None for v in values)]
    full = next((v for v in values if all(v.axes[d] is not None for d in dims)), None)
    if full is not None:
        dims.sort(key=lambda d: full.axes[d] or 0)
    else:
        dims.sort(key=lambda d: shape[d] not in (TOKENS, ROWS))
    return tuple(dims)


def placed(node: Any, dims: tuple[int, ...], val: Any) -> Value:
    """``node``, whose dimensions are the captured ``dims``, as a value like ``val``."""
    return Value(node, tuple(dims.index(d) if d in dims else None for d in range(val.dim())))


def not_dynamic(size: int, what: str) -> None:
    """Raise ``CannotPack`` where ``size`` is a number of tokens or rows."""
    if size in (TOKENS, ROWS):
        raise CannotPack(what)


def shape_text(shape: Any) -> str:
    """A captured shape for people."""
    names = {TOKENS: "T", ROWS: "N"}
    return "(" + ", ".join(names.get(s, str(s)) for s in shape) + ")"
