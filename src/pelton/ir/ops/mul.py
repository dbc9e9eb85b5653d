"""mul: ``x * y`` of equal shapes: elementwise products outside the fused ops (traced as ``aten.mul``)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pelton.ir.op import Op, Sample, register


def reference(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """``x``, ``y``: equal shapes, first axis T or N, any row stride."""
    return x * y


def shape_rule(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


def samples(g: torch.Generator) -> Iterator[Sample]:
    for shape in ((1, 576), (7, 33), (5, 3, 64)):
        x, y = torch.randn(2, *shape, generator=g)
        yield Sample(args=(x, y), name=f"{shape}")
    wide = torch.randn(4, 200, generator=g)
    yield Sample(args=(wide[:, :64], wide[:, 100:164]), name="strided rows")


OP = register(
    Op(
        name="mul",
        schema="mul(Tensor x, Tensor y) -> Tensor",
        reference=reference,
        shape_rule=shape_rule,
        samples=samples,
        tolerance={"float32": 1e-6, "bfloat16": 1e-2},
    )
)
