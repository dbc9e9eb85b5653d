"""Weight recipes: how an engine weight is made from checkpoint tensors.

A recipe is a small immutable expression over checkpoint tensor names. It is built while modules
are constructed and rewritten by model passes, and evaluated only while weights are streamed, one
at a time, so rewriting costs no memory. Row operations (``Concat`` along dim 0, ``Rows``,
``PermuteRows``) also apply to block-quantised tensors, where they are exact because blocks never
cross a row; the others need dense tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """Base class; see the concrete recipes below."""

    def sources(self) -> Iterator[str]:
        """Names of the checkpoint tensors this recipe reads, in order."""
        raise NotImplementedError


@dataclass(frozen=True)
class Source(Recipe):
    """The checkpoint tensor called ``name``, as it is."""

    name: str

    def sources(self) -> Iterator[str]:
        yield self.name


@dataclass(frozen=True)
class Concat(Recipe):
    """The parts stacked along dim 0 (output rows of a linear layer)."""

    parts: tuple[Recipe, ...]

    def sources(self) -> Iterator[str]:
        for part in self.parts:
            yield from part.sources()


@dataclass(frozen=True)
class Rows(Recipe):
    """Rows ``start:stop`` of ``base``."""

    base: Recipe
    start: int
    stop: int

    def sources(self) -> Iterator[str]:
        yield from self.base.sources()


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

    def sources(self) -> Iterator[str]:
        yield from self.base.sources()


@dataclass(frozen=True)
class Transpose(Recipe):
    """The transpose of a dense 2-D ``base`` (GPT-2's Conv1D weights)."""

    base: Recipe

    def sources(self) -> Iterator[str]:
        yield from self.base.sources()


@dataclass(frozen=True)
class AddScalar(Recipe):
    """``base + value`` in float32 (Gemma's norms store ``weight - 1``)."""

    base: Recipe
    value: float

    def sources(self) -> Iterator[str]:
        yield from self.base.sources()


def add_scalar(base: Recipe, value: float) -> Recipe:
    """``AddScalar``, folding nested ones, so that opposite adjustments cancel exactly."""
    if isinstance(base, AddScalar):
        value += base.value
        base = base.base
    return base if value == 0 else AddScalar(base, value)


def transpose(base: Recipe) -> Recipe:
    """``Transpose``; twice gives ``base`` back, so that it costs nothing and works on blocks."""
    return base.base if isinstance(base, Transpose) else Transpose(base)
