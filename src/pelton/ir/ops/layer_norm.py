"""layer_norm over the last axis, with or without weight and bias (Ba et al., 2016)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pelton.ir.op import Op, Sample, register


def reference(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """``x``: (T, D) or (T, heads, D), any row stride; computed in float32, returned in x's dtype."""
    w, b = (None if t is None else t.float() for t in (weight, bias))
    return torch.nn.functional.layer_norm(x.float(), (x.shape[-1],), w, b, eps).to(x.dtype)


def shape_rule(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    return x.new_empty(x.shape)


def samples(g: torch.Generator) -> Iterator[Sample]:
    for tokens, dim in ((1, 768), (7, 33), (64, 128)):
        x = torch.randn(tokens, dim, generator=g) + 3.0
        w, b = torch.randn(2, dim, generator=g)
        yield Sample(args=(x, w, b, 1e-5), name=f"{tokens}x{dim}")
        yield Sample(args=(x, w, None, 1e-5), name=f"{tokens}x{dim} without bias")
    heads = torch.randn(5, 200, generator=g)[:, 7:103].view(5, 3, 32)
    yield Sample(args=(heads, None, None, 1e-6), name="heads, without weight and bias")


OP = register(
    Op(
        name="layer_norm",
        schema="layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> Tensor",
        reference=reference,
        shape_rule=shape_rule,
        samples=samples,
        tolerance={"float32": 2e-6, "bfloat16": 1e-2},
    )
)
