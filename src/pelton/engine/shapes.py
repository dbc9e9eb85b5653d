"""Optimisation profiles: the shapes an engine is built for, and those it is built to be fastest at.

A step's tensors share named dimensions (``STEP_DIMS``). A profile gives some of them a range and an
optimum; ``builder.profiles`` completes profiles, holds them to each other and derives the buckets
for which tactics are chosen. Small on purpose: the command line reads it.
"""

from __future__ import annotations

import msgspec

from pelton.errors import ConfigError

#: Dimension -> step inputs that begin with it (``.G``: one a KV group). ``cu_seqlens`` has B+1 rows.
STEP_DIMS = {
    "T": ("input_ids", "positions", "slot_mapping"),
    "B": ("block_table", "seq_lens"),
    "N": ("logits_indices",),
}
DIM_MEANING = {"T": "tokens of a step", "B": "sequences of a step", "N": "logits rows of a step"}


class DimRange(msgspec.Struct, frozen=True):
    """A dimension's smallest, most frequent and largest size."""

    min: int
    opt: int
    max: int

    def __str__(self) -> str:
        return f"{self.min}:{self.opt}:{self.max}"


class OptimizationProfile(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of step, such as ``OptimizationProfile(dims={"T": DimRange(1, 1, 8)})`` for decoding."""

    dims: dict[str, DimRange]
    """By dimension (T tokens, B sequences, N logits rows) or by step input, whose first dimension is
    meant. Absent ones follow from the build's limits."""

    @classmethod
    def parse(cls, text: str) -> OptimizationProfile:
        """From ``T=1:1:8,B=1:1:8`` (NAME=MIN:OPT:MAX); raises ``ConfigError`` for anything else."""
        dims: dict[str, DimRange] = {}
        for part in text.split(","):
            name, _, sizes = (piece.strip() for piece in part.partition("="))
            numbers = sizes.split(":")
            if not name or len(numbers) != 3 or not all(n.strip().isdecimal() for n in numbers):
                raise ConfigError(
                    f"profile {text!r}: {part.strip()!r} is not NAME=MIN:OPT:MAX, such as T=1:1:8,B=1:1:8"
                )
            if name in dims:
                raise ConfigError(f"profile {text!r} names {name} twice")
            dims[name] = DimRange(*map(int, numbers))
        return cls(dims=dims)

    def __str__(self) -> str:
        return ",".join(f"{name}={sizes}" for name, sizes in self.dims.items())
