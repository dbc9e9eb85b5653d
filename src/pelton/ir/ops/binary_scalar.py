"""binary_scalar: an operation of each element with a number (``x + eps``, ``1 - x``, ``x ** 3``, clamps).

Products with a number are ``scale``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from pelton.ir.op import Op, Sample, check_float, register

KINDS: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "add": lambda x, value: x + value,
    "div": lambda x, value: x / value,
    "max": lambda x, value: x.clamp(min=value),
    "min": lambda x, value: x.clamp(max=value),
    "pow": lambda x, value: x**value,
    "rdiv": lambda x, value: value / x,
    "rsub": lambda x, value: value - x,
}


def reference(x: torch.Tensor, value: float, kind: str) -> torch.Tensor:
    """``x``: any shape, any row stride; ``rsub`` is ``value - x``, ``rdiv`` is ``value / x``."""
    return KINDS[kind](x.float(), value).to(x.dtype)


def shape_rule(x: torch.Tensor, value: float, kind: str) -> torch.Tensor:
    if kind not in KINDS:
        raise ValueError(f"binary_scalar has no kind {kind!r} (known: {', '.join(KINDS)})")
    check_float("binary_scalar", x)
    return x.new_empty(x.shape)


def samples(g: torch.Generator) -> Iterator[Sample]:
    for kind in KINDS:
        x = torch.randn(5, 77, generator=g)
        if kind in ("pow", "rdiv"):
            x = x.abs() + 0.1
        yield Sample(args=(x, 0.7, kind), name=kind)
        yield Sample(
            args=(torch.rand(3, 2, 50, generator=g)[..., 3:40] + 0.5, -1.5, kind), name=f"{kind} strided"
        )
    yield Sample(args=(torch.tensor([[1.0, float("nan"), -2.0]]), 0.0, "max"), name="max of NaN")


OP = register(
    Op(
        name="binary_scalar",
        schema="binary_scalar(Tensor x, float value, str kind) -> Tensor",
        reference=reference,
        shape_rule=shape_rule,
        samples=samples,
        tolerance={"float32": 2e-6, "bfloat16": 1e-2},
    )
)
