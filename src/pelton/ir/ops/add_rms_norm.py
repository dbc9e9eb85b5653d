"""add_rms_norm: ``s = x + residual; y = rms_norm(s)``: returns ``(y, s)``."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pelton.ir.op import Op, Sample, register
from pelton.ir.ops import rms_norm


def reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``x``, ``residual``: (T, D)."""
    total = x + residual
    return rms_norm.reference(total, weight, eps), total


def shape_rule(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


def samples(g: torch.Generator) -> Iterator[Sample]:
    for tokens, dim in ((1, 576), (7, 33), (64, 128)):
        x, r = torch.randn(2, tokens, dim, generator=g)
        yield Sample(args=(x, r, torch.randn(dim, generator=g), 1e-5), name=f"{tokens}x{dim}")


OP = register(
    Op(
        name="add_rms_norm",
        schema="add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
        reference=reference,
        shape_rule=shape_rule,
        samples=samples,
        tolerance={"float32": 1e-6, "bfloat16": 1e-2},
    )
)
