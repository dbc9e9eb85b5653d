"""reduce: sum, mean or largest value of the last axis."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from pelton.ir.op import Op, Sample, check_float, register

KINDS: dict[str, Callable[[torch.Tensor, bool], torch.Tensor]] = {
    "max": lambda x, keepdim: x.amax(-1, keepdim=keepdim),
    "mean": lambda x, keepdim: x.mean(-1, keepdim=keepdim),
    "sum": lambda x, keepdim: x.sum(-1, keepdim=keepdim),
}


def reference(x: torch.Tensor, kind: str, keepdim: bool) -> torch.Tensor:
    """``x``: (..., D) with at least two axes, any row stride -> (..., 1), or (...) without ``keepdim``."""
    return KINDS[kind](x.float(), keepdim).to(x.dtype)


def shape_rule(x: torch.Tensor, kind: str, keepdim: bool) -> torch.Tensor:
    if kind not in KINDS:
        raise ValueError(f"reduce has no kind {kind!r} (known: {', '.join(KINDS)})")
    check_float("reduce", x)
    return x.new_empty((*x.shape[:-1], 1) if keepdim else x.shape[:-1])


def samples(g: torch.Generator) -> Iterator[Sample]:
    for kind in KINDS:
        for shape in ((1, 576), (7, 33), (5, 3, 64), (3, 1), (2, 5000)):
            x = torch.randn(shape, generator=g) + 1
            yield Sample(args=(x, kind, len(shape) == 2), name=f"{kind} of {shape}")
        wide = torch.randn(4, 200, generator=g)[:, 61:129] - 2
        yield Sample(args=(wide, kind, True), name=f"{kind} of strided rows")
    nan = torch.randn(3, 40, generator=g)
    nan[0, 39] = nan[1, 5] = float("nan")
    yield Sample(args=(nan, "max", True), name="max of NaN")


OP = register(
    Op(
        name="reduce",
        schema="reduce(Tensor x, str kind, bool keepdim) -> Tensor",
        reference=reference,
        shape_rule=shape_rule,
        samples=samples,
        tolerance={"float32": 2e-6, "bfloat16": 1e-2},
    )
)
