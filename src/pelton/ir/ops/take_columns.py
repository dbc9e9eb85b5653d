"""take_columns: ``x[:, order]`` (the input of a product whose weight has its columns in another order)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pelton.ir.op import Op, Sample, register


def reference(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """``x``: (T, K); ``order``: (K,) whole numbers, as float32 like every vector of weights -> (T, K)."""
    return x[:, order.long()]


def shape_rule(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


def samples(g: torch.Generator) -> Iterator[Sample]:
    for rows, cols in ((1, 40), (13, 96), (3, 2050)):
        x = torch.randn(rows, cols, generator=g)
        order = torch.randperm(cols, generator=g).float()
        yield Sample(args=(x, order), name=f"{rows}x{cols}")


OP = register(
    Op(
        name="take_columns",
        schema="take_columns(Tensor x, Tensor order) -> Tensor",
        reference=reference,
        shape_rule=shape_rule,
        samples=samples,
        tolerance={"float32": 0.0, "bfloat16": 0.0, "float16": 0.0},
    )
)
