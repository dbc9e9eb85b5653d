"""unary: an elementary function of each element, in float32 (``aten.exp``, ``aten.rsqrt``, ...)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from pelton.ir.op import Op, Sample, check_float, register

KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "abs": torch.abs,
    "cos": torch.cos,
    "exp": torch.exp,
    "log": torch.log,
    "neg": torch.neg,
    "reciprocal": torch.reciprocal,
    "rsqrt": torch.rsqrt,
    "sigmoid": torch.sigmoid,
    "sin": torch.sin,
    "sqrt": torch.sqrt,
    "square": torch.square,
    "tanh": torch.tanh,
}


def reference(x: torch.Tensor, kind: str) -> torch.Tensor:
    """``x``: any shape, any row stride; ``kind``: one of ``KINDS`` (``activation`` has the others)."""
    return KINDS[kind](x.float()).to(x.dtype)


def shape_rule(x: torch.Tensor, kind: str) -> torch.Tensor:
    if kind not in KINDS:
        raise ValueError(f"unary has no kind {kind!r} (known: {', '.join(KINDS)})")
    check_float("unary", x)
    return x.new_empty(x.shape)


def samples(g: torch.Generator) -> Iterator[Sample]:
    for kind in KINDS:
        x = torch.randn(5, 77, generator=g) * 4
        yield Sample(args=(x.abs() + 0.1 if kind in ("log", "rsqrt", "sqrt") else x, kind), name=kind)
        yield Sample(
            args=(torch.rand(3, 2, 200, generator=g)[:, :, 7:40] + 0.5, kind), name=f"{kind} strided"
        )
    for kind in ("abs", "exp", "neg", "sigmoid", "square", "tanh"):
        yield Sample(args=(torch.linspace(-100, 100, 64)[None], kind), name=f"{kind} extremes")


OP = register(
    Op(
        name="unary",
        schema="unary(Tensor x, str kind) -> Tensor",
        reference=reference,
        shape_rule=shape_rule,
        samples=samples,
        tolerance={"float32": 2e-6, "bfloat16": 1e-2},
    )
)
