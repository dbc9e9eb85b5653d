"""rope_interleaved: rotary embedding of neighbouring pairs (Su et al., 2021; GPT-J's layout)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pelton.ir.op import Op, Sample, register


def reference(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """``x``: (T, heads, D); ``cos_sin``: (T, R) as ``rope`` takes it; elements 2i and 2i + 1 make a pair."""
    rotary = cos_sin.shape[-1]
    cos, sin = cos_sin[:, None, : rotary // 2], cos_sin[:, None, rotary // 2 :]
    x32 = x.float()
    a, b = x32[..., 0:rotary:2], x32[..., 1:rotary:2]
    turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    return torch.cat([turned, x32[..., rotary:]], dim=-1).to(x.dtype)


def shape_rule(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


def samples(g: torch.Generator) -> Iterator[Sample]:
    for tokens, heads, dim, rotary in ((1, 9, 64, 64), (5, 3, 80, 32), (3, 1, 256, 256)):
        angle = torch.randn(tokens, rotary // 2, generator=g)
        cos_sin = torch.cat([angle.cos(), angle.sin()], -1)
        x = torch.randn(tokens, heads, dim, generator=g)
        yield Sample(args=(x, cos_sin), name=f"{tokens}x{heads}x{dim} rotary {rotary}")
    packed, cos_sin = torch.randn(4, 200, generator=g), torch.randn(4, 20, generator=g)
    yield Sample(args=(packed[:, 8:104].view(4, 3, 32), cos_sin), name="strided heads")


OP = register(
    Op(
        name="rope_interleaved",
        schema="rope_interleaved(Tensor x, Tensor cos_sin) -> Tensor",
        reference=reference,
        shape_rule=shape_rule,
        samples=samples,
        tolerance={"float32": 2e-6, "bfloat16": 1e-2},
    )
)
