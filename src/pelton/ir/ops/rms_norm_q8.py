"""rms_norm_q8: ``quantize_q8(rms_norm(x))``."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pelton.ir.op import Op, Sample, register
from pelton.ir.ops import quantize_q8, rms_norm


def reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x``: (T, D) -> uint8 (T, D / 32 * 44)."""
    return quantize_q8.reference(rms_norm.reference(x, weight, eps))


def shape_rule(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return quantize_q8.shape_rule(x)


def samples(g: torch.Generator) -> Iterator[Sample]:
    for tokens, dim in ((1, 576), (7, 64), (64, 128)):
        x = torch.randn(tokens, dim, generator=g)
        yield Sample(args=(x, torch.randn(dim, generator=g), 1e-5), name=f"{tokens}x{dim}")


OP = register(
    Op(
        name="rms_norm_q8",
        schema="rms_norm_q8(Tensor x, Tensor weight, float eps) -> Tensor",
        reference=reference,
        shape_rule=shape_rule,
        samples=samples,
        tolerance={"float32": 1e-2},
        optional=True,
    )
)
