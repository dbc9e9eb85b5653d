"""rope: rotary position embedding, half-split form (Su et al., 2021; GPT-NeoX layout)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pelton.ir.op import Op, Sample, register


def reference(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """``x``: (T, heads, D); ``cos_sin``: (T, R), R <= D; dims beyond R pass through."""
    half = cos_sin.shape[-1] // 2
    cos, sin = cos_sin[:, None, :half], cos_sin[:, None, half:]
    x32 = x.float()
    a, b, rest = x32[..., :half], x32[..., half : 2 * half], x32[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1).to(x.dtype)


def shape_rule(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


def samples(g: torch.Generator) -> Iterator[Sample]:
    for tokens, heads, dim, rotary in ((1, 9, 64, 64), (5, 3, 80, 32), (3, 1, 256, 256)):
        angle = torch.randn(tokens, rotary // 2, generator=g)
        cos_sin = torch.cat([angle.cos(), angle.sin()], -1)
        x = torch.randn(tokens, heads, dim, generator=g)
        yield Sample(args=(x, cos_sin), name=f"{tokens}x{heads}x{dim} rotary {rotary}")


OP = register(
    Op(
        name="rope",
        schema="rope(Tensor x, Tensor cos_sin) -> Tensor",
        reference=reference,
        shape_rule=shape_rule,
        samples=samples,
        tolerance={"float32": 2e-6, "bfloat16": 1e-2},
    )
)
