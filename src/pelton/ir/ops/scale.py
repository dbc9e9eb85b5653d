"""scale: ``x * factor`` (Gemma's embedding multiplier; traced as ``aten.mul`` by a number)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pelton.ir.op import Op, Sample, register


def reference(x: torch.Tensor, factor: float) -> torch.Tensor:
    """``x``: any shape, any row stride."""
    return x * factor


def shape_rule(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x.new_empty(x.shape)


def samples(g: torch.Generator) -> Iterator[Sample]:
    for shape in ((1, 576), (7, 33), (5, 3, 64)):
        yield Sample(args=(torch.randn(shape, generator=g), 25.3), name=f"{shape}")
    yield Sample(args=(torch.randn(4, 200, generator=g)[:, 60:124], -0.5), name="strided rows")


OP = register(
    Op(
        name="scale",
        schema="scale(Tensor x, float factor) -> Tensor",
        reference=reference,
        shape_rule=shape_rule,
        samples=samples,
        tolerance={"float32": 1e-6, "bfloat16": 1e-2},
    )
)
