"""linear_add: ``y = x @ weight.T (+ bias) + residual``, a projection back into the residual stream."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pelton.ir.op import Op, Sample, register


def reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor
) -> torch.Tensor:
    """``x``: (T, K); ``weight``: (N, K); ``bias``: (N,) or None; ``residual``: (T, N) -> (T, N).

    The product is rounded once, with the residual added.
    """
    out = x.float() @ weight.float().t() + residual.float()
    if bias is not None:
        out = out + bias.float()
    return out.to(x.dtype)


def shape_rule(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor
) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


def samples(g: torch.Generator) -> Iterator[Sample]:
    shapes = ((1, 48, 64), (1, 33, 96), (2, 64, 256), (9, 40, 200), (33, 100, 288), (67, 49, 256))
    for tokens, n, k in shapes:
        x = torch.randn(tokens, k, generator=g)
        w = torch.randn(n, k, generator=g) * k**-0.5
        b = torch.randn(n, generator=g) if n % 2 else None
        r = torch.randn(tokens, n, generator=g)
        yield Sample(args=(x, w, b, r), name=f"{tokens}x{n}x{k}", quant={1: "float32"})
    for quant in ("int4_g128", "fp8_row"):
        x, r = torch.randn(5, 256, generator=g), torch.randn(5, 48, generator=g)
        w = torch.randn(48, 256, generator=g) / 16
        yield Sample(args=(x, w, torch.randn(48, generator=g), r), name=f"{quant} 5x48x256", quant={1: quant})
    for quant in ("fp8_row", "int8_row"):  # whose kernels on GPUs share columns between blocks
        x, r = torch.randn(134, 1152, generator=g), torch.randn(134, 72, generator=g)
        w = torch.randn(72, 1152, generator=g) / 32
        yield Sample(args=(x, w, None, r), name=f"{quant} 134x72x1152", quant={1: quant})
    wide = torch.randn(4, 300, generator=g)
    w = torch.randn(24, 64, generator=g) / 8
    yield Sample(args=(wide[:, 100:164], w, None, wide[:, :24]), name="strided rows", quant={1: "float32"})


OP = register(
    Op(
        name="linear_add",
        schema="linear_add(Tensor x, Tensor weight, Tensor? bias, Tensor residual) -> Tensor",
        reference=reference,
        shape_rule=shape_rule,
        samples=samples,
        tolerance={"float32": 1e-5, "bfloat16": 1e-2, "int8": 2e-2, "fp8": 6e-2},
        optional=True,
    )
)
