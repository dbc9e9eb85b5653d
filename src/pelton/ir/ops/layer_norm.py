"""layer_norm over the last axis with weight and bias (Ba et al., 2016)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pelton.ir.op import Op, Sample, register


def reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """``x``: (T, D); computed in float32, returned in x's dtype."""
    return torch.nn.functional.layer_norm(x.float(), (x.shape[-1],), weight.float(), bias.float(), eps).to(
        x.dtype
    )


def shape_rule(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    return x.new_empty(x.shape)


def samples(g: torch.Generator) -> Iterator[Sample]:
    for tokens, dim in ((1, 768), (7, 33), (64, 128)):
        x = torch.randn(tokens, dim, generator=g) + 3.0
        w, b = torch.randn(2, dim, generator=g)
        yield Sample(args=(x, w, b, 1e-5), name=f"{tokens}x{dim}")


OP = register(
    Op(
        name="layer_norm",
        schema="layer_norm(Tensor x, Tensor weight, Tensor bias, float eps) -> Tensor",
        reference=reference,
        shape_rule=shape_rule,
        samples=samples,
        tolerance={"float32": 2e-6, "bfloat16": 1e-2},
    )
)
