"""rms_norm: ``x / sqrt(mean(x^2) + eps) * weight`` over the last axis (Zhang & Sennrich, 2019)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pelton.ir.op import Op, Sample, register


def reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x``: (T, D) or (T, heads, D), any row stride; computed in float32, returned in x's dtype."""
    x32 = x.float()
    scale = torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    return (x32 * scale * weight.float()).to(x.dtype)


def shape_rule(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x.new_empty(x.shape)


def samples(g: torch.Generator) -> Iterator[Sample]:
    for tokens, heads, dim in ((1, 0, 576), (7, 0, 33), (3, 4, 64), (5, 3, 256)):
        shape = (tokens, heads, dim) if heads else (tokens, dim)
        x = torch.randn(shape, generator=g)
        yield Sample(args=(x, torch.randn(dim, generator=g), 1e-5), name=f"{shape}")
    wide = torch.randn(4, 200, generator=g)
    yield Sample(args=(wide[:, 60:124], torch.randn(64, generator=g), 1e-6), name="strided rows")
    yield Sample(args=(torch.zeros(2, 64), torch.ones(64), 1e-6), name="zeros")


OP = register(
    Op(
        name="rms_norm",
        schema="rms_norm(Tensor x, Tensor weight, float eps) -> Tensor",
        reference=reference,
        shape_rule=shape_rule,
        samples=samples,
        tolerance={"float32": 1e-6, "bfloat16": 1e-2},
    )
)
