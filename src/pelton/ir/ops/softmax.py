"""softmax: ``exp(x - max) / sum`` over the last axis."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pelton.ir.op import Op, Sample, check_float, register


def reference(x: torch.Tensor) -> torch.Tensor:
    """``x``: (..., D), any row stride; computed in float32."""
    return torch.softmax(x.float(), -1).to(x.dtype)


def shape_rule(x: torch.Tensor) -> torch.Tensor:
    check_float("softmax", x)
    return x.new_empty(x.shape)


def samples(g: torch.Generator) -> Iterator[Sample]:
    for shape in ((1, 576), (7, 33), (5, 3, 64), (4, 1)):
        yield Sample(args=(torch.randn(shape, generator=g) * 5,), name=f"{shape}")
    yield Sample(args=(torch.randn(4, 200, generator=g)[:, 60:99] * 80,), name="strided rows, far apart")
    masked = torch.randn(2, 40, generator=g)
    masked[:, 7:20] = float("-inf")
    yield Sample(args=(masked,), name="masked")


OP = register(
    Op(
        name="softmax",
        schema="softmax(Tensor x) -> Tensor",
        reference=reference,
        shape_rule=shape_rule,
        samples=samples,
        tolerance={"float32": 2e-6, "bfloat16": 1e-2},
    )
)
