"""add_rms_norm_q8: ``s = x + residual; q = quantize_q8(rms_norm(s))``: returns ``(q, s)``."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pelton.ir.op import Op, Sample, register
from pelton.ir.ops import add_rms_norm, quantize_q8


def reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``x``, ``residual``: (T, D) -> uint8 (T, D / 32 * 44), (T, D)."""
    normed, total = add_rms_norm.reference(x, residual, weight, eps)
    return quantize_q8.reference(normed), total


def shape_rule(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return quantize_q8.shape_rule(x), x.new_empty(x.shape)


def samples(g: torch.Generator) -> Iterator[Sample]:
    for tokens, dim in ((1, 576), (7, 64), (64, 128)):
        x, r = torch.randn(2, tokens, dim, generator=g)
        yield Sample(args=(x, r, torch.randn(dim, generator=g), 1e-5), name=f"{tokens}x{dim}")


OP = register(
    Op(
        name="add_rms_norm_q8",
        schema="add_rms_norm_q8(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
        reference=reference,
        shape_rule=shape_rule,
        samples=samples,
        tolerance={"float32": 1e-2},
        optional=True,
    )
)
