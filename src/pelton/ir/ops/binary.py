"""binary: an operation of two tensors, element by element, with broadcasting (traced from ``aten.add``, ...).

Sums and products of equal shapes are ``add`` and ``mul``, which fused ops take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from pelton.ir.op import Op, Sample, check_float, register

KINDS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": torch.add,
    "div": torch.div,
    "max": torch.maximum,
    "min": torch.minimum,
    "mul": torch.mul,
    "pow": torch.pow,
    "sub": torch.sub,
}


def reference(x: torch.Tensor, y: torch.Tensor, kind: str) -> torch.Tensor:
    """``x``, ``y``: shapes that broadcast by NumPy's rules, up to four axes; in float32, x's dtype out."""
    return KINDS[kind](x.float(), y.float()).to(x.dtype)


def shape_rule(x: torch.Tensor, y: torch.Tensor, kind: str) -> torch.Tensor:
    if kind not in KINDS:
        raise ValueError(f"binary has no kind {kind!r} (known: {', '.join(KINDS)})")
    check_float("binary", x, y)
    return x.new_empty(torch.broadcast_tensors(x, y)[0].shape)


def samples(g: torch.Generator) -> Iterator[Sample]:
    for kind in KINDS:
        x, y = torch.randn(2, 5, 77, generator=g)
        if kind == "pow":
            x = x.abs() + 0.1
        if kind == "div":
            y = y.sign() * (y.abs() + 0.1)
        yield Sample(args=(x, y, kind), name=kind)
        yield Sample(args=(x, y[0], kind), name=f"{kind} a vector")
    shapes = {
        "a value per row": ((6, 130), (6, 1)),
        "a value per row, first": ((6, 1), (6, 33)),
        "rows and columns": ((4, 1), (1, 33)),
        "one value": ((3, 40), (1,)),
        "per head": ((5, 3, 64), (3, 64)),
        "per head, first": ((3, 64), (5, 3, 64)),
        "a value per head": ((5, 3, 20), (5, 3, 1)),
        "per token, all heads": ((5, 3, 20), (5, 1, 20)),
        "long rows": ((2, 2500), (2500,)),
    }
    for name, (a, b) in shapes.items():
        yield Sample(args=(torch.randn(a, generator=g), torch.randn(b, generator=g), "sub"), name=name)
    wide = torch.randn(4, 200, generator=g)
    yield Sample(args=(wide[:, :64], wide[:, 100:101], "mul"), name="strided rows")
    for dtype in (torch.bfloat16, torch.float16):
        x, y = torch.randn(5, 3, 37, generator=g), torch.randn(3, 37, generator=g).to(dtype)
        yield Sample(args=(x, y, "mul"), name=f"per head, {dtype}")


OP = register(
    Op(
        name="binary",
        schema="binary(Tensor x, Tensor y, str kind) -> Tensor",
        reference=reference,
        shape_rule=shape_rule,
        samples=samples,
        tolerance={"float32": 2e-6, "bfloat16": 1e-2},
    )
)
