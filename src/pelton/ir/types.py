"""Types of the graph's edges: named dimensions and what a graph input is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Dim = int | str
"""A size: a number, or a dynamic dimension's name: "T", "B", "B+1", "N", "P0", "P1", ..."""

InputKind = Literal["weight", "constant", "input", "k_cache", "v_cache"]


@dataclass(frozen=True, kw_only=True)
class TensorType:
    """What is known of an edge at build: its elements, shape, and place in memory it views."""

    dtype: str
    """As in ``pelton.dtypes``: ``float32``, ``int32``, ..."""
    shape: tuple[Dim, ...]
    strides: tuple[int, ...]
    """In elements; only the first dimension is dynamic, so they are numbers."""
    offset: int
    """In elements from the start of the storage that the tensor views."""


@dataclass(frozen=True, kw_only=True)
class GraphInput:
    """What a graph's placeholder stands for; kinds and names as ``engine.plan.Buffer``'s."""

    kind: InputKind
    name: str
    """Parameter or buffer name of the model, or the step input's name (``slot_mapping.0``)."""
    layer: int = -1
    group: int = -1
