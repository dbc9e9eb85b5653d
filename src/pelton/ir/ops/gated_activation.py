"""gated_activation: ``act(gate) * up`` (SwiGLU, GeGLU: Shazeer, 2020)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pelton.ir.op import Op, Sample, register
from pelton.ir.ops import activation


def reference(gate: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
    """``gate``, ``up``: (T, I), any row stride (halves of one packed projection)."""
    return (activation.KINDS[kind](gate.float()) * up.float()).to(gate.dtype)


def shape_rule(gate: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
    return gate.new_empty(gate.shape)


def samples(g: torch.Generator) -> Iterator[Sample]:
    for kind in ("silu", "gelu_tanh", "gelu"):
        packed = torch.randn(5, 154, generator=g) * 3
        yield Sample(args=(packed[:, :77], packed[:, 77:], kind), name=f"{kind} packed")
        gate, up = torch.randn(2, 1, 1536, generator=g)
        yield Sample(args=(gate, up, kind), name=f"{kind} apart")


OP = register(
    Op(
        name="gated_activation",
        schema="gated_activation(Tensor gate, Tensor up, str kind) -> Tensor",
        reference=reference,
        shape_rule=shape_rule,
        samples=samples,
        tolerance={"float32": 2e-6, "bfloat16": 1e-2},
    )
)
