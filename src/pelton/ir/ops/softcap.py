"""softcap: ``cap * tanh(x / cap)`` (Gemma 2)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pelton.ir.op import Op, Sample, register


def reference(x: torch.Tensor, cap: float) -> torch.Tensor:
    """``x``: any shape; ``cap`` > 0."""
    return (cap * torch.tanh(x.float() / cap)).to(x.dtype)


def shape_rule(x: torch.Tensor, cap: float) -> torch.Tensor:
    return x.new_empty(x.shape)


def samples(g: torch.Generator) -> Iterator[Sample]:
    yield Sample(args=(torch.randn(5, 77, generator=g) * 60, 30.0), name="5x77")


OP = register(
    Op(
        name="softcap",
        schema="softcap(Tensor x, float cap) -> Tensor",
        reference=reference,
        shape_rule=shape_rule,
        samples=samples,
        tolerance={"float32": 2e-6, "bfloat16": 1e-2},
    )
)
