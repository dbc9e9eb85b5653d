"""activation: an elementwise nonlinearity, computed in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.nn import functional as F

from pelton.ir.op import Op, Sample, register

KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


def reference(x: torch.Tensor, kind: str) -> torch.Tensor:
    """``x``: (T, D); ``kind``: one of ``KINDS``."""
    return KINDS[kind](x.float()).to(x.dtype)


def shape_rule(x: torch.Tensor, kind: str) -> torch.Tensor:
    return x.new_empty(x.shape)


def samples(g: torch.Generator) -> Iterator[Sample]:
    for kind in KINDS:
        yield Sample(args=(torch.randn(5, 77, generator=g) * 4, kind), name=kind)
        yield Sample(args=(torch.linspace(-100, 100, 64)[None], kind), name=f"{kind} extremes")


OP = register(
    Op(
        name="activation",
        schema="activation(Tensor x, str kind) -> Tensor",
        reference=reference,
        shape_rule=shape_rule,
        samples=samples,
        tolerance={"float32": 2e-6, "bfloat16": 1e-2},
    )
)
