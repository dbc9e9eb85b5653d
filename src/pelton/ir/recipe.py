"""Weight recipes: how an engine weight is made from checkpoint tensors.

A recipe is a small immutable expression over checkpoint tensor names. It is built while modules
are constructed and rewritten by passes, and evaluated only while weights are streamed, one at a
time, so rewriting costs no memory. Row operations (``Concat`` along dim 0, ``Rows``, ``PadRows``,
``PermuteRows``) also apply to block-quantised tensors, where they are exact because blocks never
cross a row; the others need dense tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace


@dataclass(frozen=True)
class Recipe:
    """Base class; see the concrete recipes below."""

    def bases(self) -> tuple[Recipe, ...]:
        """The recipes that this one is made of, in the order of its fields."""
        values = (getattr(self, field.name) for field in fields(self))
        return tuple(
            r for v in values for r in (v if isinstance(v, tuple) else (v,)) if isinstance(r, Recipe)
        )

    def over(self, *bases: Recipe) -> Recipe:
        """The same of other ``bases``; what cancels with them is folded away."""
        changed: dict[str, object] = {}
        rest = iter(bases)
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Recipe):
                changed[field.name] = next(rest)
            elif isinstance(value, tuple) and value and isinstance(value[0], Recipe):
                changed[field.name] = tuple(next(rest) for _ in value)
        return replace(self, **changed)  # type: ignore[arg-type]

    def sources(self) -> Iterator[str]:
        """Names of the checkpoint tensors this recipe reads, in order."""
        for base in self.bases():
            yield from base.sources()

    def resolve(self, source: Callable[[str], Recipe]) -> Recipe:
        """The same with every source replaced by the recipe that ``source`` gives for its name."""
        return self.over(*(base.resolve(source) for base in self.bases()))


@dataclass(frozen=True)
class Source(Recipe):
    """The checkpoint tensor called ``name``, as it is."""

    name: str

    def sources(self) -> Iterator[str]:
        yield self.name

    def resolve(self, source: Callable[[str], Recipe]) -> Recipe:
        return source(self.name)


@dataclass(frozen=True)
class Concat(Recipe):
    """The parts stacked along dim 0 (output rows of a linear layer): of one type, or dense ones of
    several, which are then float32."""

    parts: tuple[Recipe, ...]


@dataclass(frozen=True)
class Rows(Recipe):
    """Rows ``start:stop`` of ``base``."""

    base: Recipe
    start: int
    stop: int

    def over(self, *bases: Recipe) -> Recipe:
        (base,) = bases
        return rows(base, self.start, self.stop)


@dataclass(frozen=True)
class PadRows(Recipe):
    """``base`` with rows of zeros after its own, ``rows`` in all."""

    base: Recipe
    rows: int


@dataclass(frozen=True)
class Columns(Recipe):
    """Columns ``start:stop`` of a dense 2-D ``base``."""

    base: Recipe
    start: int
    stop: int


@dataclass(frozen=True)
class PermuteRows(Recipe):
    """``base`` with row ``i`` taken from ``base`` row ``order(i)``.

    Rows are seen as ``(heads, a, b)`` and the last two axes are swapped: llama.cpp stores the q and
    k projections of LLaMA-family models with each head's rows permuted for interleaved RoPE; with
    ``a=2, b=head_dim//2`` read as ``(heads, b, a)`` this undoes it.
    """

    base: Recipe
    heads: int
    inner: int
    """Number of rows each head's inner axis has in ``base`` (the faster one)."""


@dataclass(frozen=True)
class TakeRows(Recipe):
    """Row i of the result is row ``order[i]`` of ``base``, of any value type; ``order``: int32."""

    base: Recipe
    order: Recipe


@dataclass(frozen=True)
class TakeColumns(Recipe):
    """Column i of the result is column ``order[i]`` of the 2-D ``base``; ``order`` is a vector of int32.

    Blocks come dequantised (float32), since their groups are torn apart.
    """

    base: Recipe
    order: Recipe

    def over(self, *bases: Recipe) -> Recipe:
        return take_columns(*bases)


@dataclass(frozen=True)
class PutColumns(Recipe):
    """Column i of the 2-D ``base`` is column ``order[i]`` of the result: undoes ``TakeColumns``.

    GPTQ's act-order: a weight is stored with the columns of each group together, and this puts them back.
    Blocks come dequantised (float32).
    """

    base: Recipe
    order: Recipe


@dataclass(frozen=True)
class Transpose(Recipe):
    """The transpose of a dense 2-D ``base`` (GPT-2's Conv1D weights)."""

    base: Recipe

    def over(self, *bases: Recipe) -> Recipe:
        (base,) = bases
        return transpose(base)


@dataclass(frozen=True)
class AddScalar(Recipe):
    """``base + value`` in float32 (Gemma's norms store ``weight - 1``)."""

    base: Recipe
    value: float

    def over(self, *bases: Recipe) -> Recipe:
        (base,) = bases
        return add_scalar(base, self.value)


@dataclass(frozen=True)
class Scale(Recipe):
    """A dense ``base`` times a number: in its own type where that is exact (``is_power_of_two``), else in
    float32."""

    base: Recipe
    factor: float


@dataclass(frozen=True)
class ScaleColumns(Recipe):
    """A dense 2-D ``base``, column j times element j of the dense vector ``factors``, in float32."""

    base: Recipe
    factors: Recipe


@dataclass(frozen=True)
class ScaleRows(Recipe):
    """A dense ``base``, row i (of a vector, element i) times ``factors[i]``: in its own type where all are
    powers of two, else in float32."""

    base: Recipe
    factors: tuple[float, ...]


@dataclass(frozen=True)
class Product(Recipe):
    """``weight @ vector`` of dense tensors, in float32: what a vector before a linear layer is after it."""

    weight: Recipe
    vector: Recipe


@dataclass(frozen=True)
class Sum(Recipe):
    """Dense tensors of one shape, added up in float32."""

    parts: tuple[Recipe, ...]


@dataclass(frozen=True)
class Flatten(Recipe):
    """A dense ``base`` as one vector, its rows one after another."""

    base: Recipe


@dataclass(frozen=True)
class Full(Recipe):
    """A vector of ``size`` equal values, float32, from no tensor at all."""

    size: int
    value: float


def is_power_of_two(factor: float) -> bool:
    """Whether a product with ``factor`` only changes exponents, so that no bit of a value is lost (but by
    overflow or underflow)."""
    return factor != 0 and math.isfinite(factor) and abs(math.frexp(factor)[0]) == 0.5


def add_scalar(base: Recipe, value: float) -> Recipe:
    """``AddScalar``, folding nested ones, so that opposite adjustments cancel exactly."""
    if isinstance(base, AddScalar):
        value += base.value
        base = base.base
    return base if value == 0 else AddScalar(base, value)


def transpose(base: Recipe) -> Recipe:
    """``Transpose``; twice gives ``base`` back, so that it costs nothing and works on blocks."""
    return base.base if isinstance(base, Transpose) else Transpose(base)


def take_columns(base: Recipe, order: Recipe) -> Recipe:
    """``TakeColumns``; of columns that were put in the same order it is what they were put from."""
    if isinstance(base, PutColumns) and base.order == order:
        return base.base
    return TakeColumns(base, order)


def rows(base: Recipe, start: int, stop: int) -> Recipe:
    """``Rows``, taken as early as possible, so that evaluating it reads no more than it must."""
    match base:
        case Rows(inner, first, _):
            return rows(inner, first + start, first + stop)
        case AddScalar(inner, value):
            return AddScalar(rows(inner, start, stop), value)
        case Scale(inner, factor):
            return Scale(rows(inner, start, stop), factor)
        case ScaleColumns(inner, factors):
            return ScaleColumns(rows(inner, start, stop), factors)
        case ScaleRows(inner, by_row):
            return ScaleRows(rows(inner, start, stop), by_row[start:stop])
        case TakeColumns(inner, order):
            return TakeColumns(rows(inner, start, stop), order)
        case PutColumns(inner, order):
            return PutColumns(rows(inner, start, stop), order)
    return Rows(base, start, stop)


def is_row_wise(recipe: Recipe) -> bool:
    """Whether ``rows`` of it are made of rows of one checkpoint tensor, so that a part costs as its size."""
    match recipe:
        case Rows(inner) | AddScalar(inner) | Scale(inner) | ScaleColumns(inner) | ScaleRows(inner):
            return is_row_wise(inner)
        case TakeColumns(inner) | PutColumns(inner):
            return is_row_wise(inner)
    return isinstance(recipe, Source)
