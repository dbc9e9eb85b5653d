"""take_rows: ``x[index]`` along dim 0 (hidden states of the tokens whose logits are wanted)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pelton.ir.op import Op, Sample, register


def reference(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """``x``: (T, H); ``index``: (N,) int32 -> (N, H)."""
    return x[index.long()]


def shape_rule(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return x.new_empty((index.shape[0], x.shape[1]))


def samples(g: torch.Generator) -> Iterator[Sample]:
    x = torch.randn(13, 40, generator=g)
    yield Sample(args=(x, torch.tensor([12, 0, 5], dtype=torch.int32)), name="13x40")


OP = register(
    Op(
        name="take_rows",
        schema="take_rows(Tensor x, Tensor index) -> Tensor",
        reference=reference,
        shape_rule=shape_rule,
        samples=samples,
        tolerance={"float32": 0.0, "bfloat16": 0.0},
    )
)
