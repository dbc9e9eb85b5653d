"""to_float32: the logits of a model that computes in a shorter type, as samplers and callers want them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pelton.ir.op import Op, Sample, register


def reference(x: torch.Tensor) -> torch.Tensor:
    """``x``: any shape and float type -> float32, a copy."""
    return x.to(torch.float32, copy=True)


def shape_rule(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape, dtype=torch.float32)


def samples(g: torch.Generator) -> Iterator[Sample]:
    for dtype in (torch.bfloat16, torch.float16):
        yield Sample(args=(torch.randn(5, 77, generator=g).to(dtype),), name=str(dtype))


OP = register(
    Op(
        name="to_float32",
        schema="to_float32(Tensor x) -> Tensor",
        reference=reference,
        shape_rule=shape_rule,
        samples=samples,
        tolerance={"float32": 1e-7, "bfloat16": 1e-2},
    )
)
