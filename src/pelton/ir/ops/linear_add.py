"""linear_add: ``y = x @ weight.T (+ bias) + residual``, a projection back into the residual stream."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pelton.ir import float16_sums
from pelton.ir.op import Op, Sample, register
from pelton.ir.static_codes import STATIC_SAMPLES, rounded, scale_of, to_codes


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    x_scale: float | None = None,
    x_codes: str | None = None,
) -> torch.Tensor:
    """``x``: (T, K); ``weight``: (N, K); ``bias``: (N,) or None; ``residual``: (T, N) -> (T, N).

    The product is rounded once, with the residual added, to the residual's type. ``x_scale``, ``x_codes``: as
    in ``linear``; ``x`` may be the codes.
    """
    out = rounded(x, x_scale, x_codes).float() @ weight.float().t() + residual.float()
    if bias is not None:
        out = out + bias.float()
    return out.to(residual.dtype)


def shape_rule(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    x_scale: float | None = None,
    x_codes: str | None = None,
) -> torch.Tensor:
    return residual.new_empty((x.shape[0], weight.shape[0]))


def samples(g: torch.Generator) -> Iterator[Sample]:
    shapes = ((1, 48, 64), (1, 33, 96), (2, 64, 256), (9, 40, 200), (33, 100, 288), (67, 49, 256))
    for tokens, n, k in shapes:
        x = torch.randn(tokens, k, generator=g)
        w = torch.randn(n, k, generator=g) * k**-0.5
        b = torch.randn(n, generator=g) if n % 2 else None
        r = torch.randn(tokens, n, generator=g)
        yield Sample(args=(x, w, b, r), name=f"{tokens}x{n}x{k}", quant={1: "float32"})
    for quant in ("int4_g128", "fp8_row", "q4_k", "q6_k"):
        x, r = torch.randn(5, 256, generator=g), torch.randn(5, 48, generator=g)
        w = torch.randn(48, 256, generator=g) / 16
        yield Sample(args=(x, w, torch.randn(48, generator=g), r), name=f"{quant} 5x48x256", quant={1: quant})
    shared = (("fp8_row", 134, 72), ("int8_row", 134, 72), ("fp8_g128", 134, 208), ("fp8_g128", 60, 208))
    for quant, tokens, n in shared:  # whose kernels on GPUs share columns between blocks
        x, r = torch.randn(tokens, 1152, generator=g), torch.randn(tokens, n, generator=g)
        w = torch.randn(n, 1152, generator=g) / 32
        yield Sample(args=(x, w, None, r), name=f"{quant} {tokens}x{n}x1152", quant={1: quant})
    for tokens, (quant, codes) in STATIC_SAMPLES:
        x, w = torch.randn(tokens, 256, generator=g), torch.randn(48, 256, generator=g) / 16
        rest = (w, None, torch.randn(tokens, 48, generator=g), scale := scale_of(x, codes), codes)
        yield Sample(args=(x, *rest), name=f"{quant} {tokens}x48x256 static", quant={1: quant})
        q = to_codes(x, scale, codes)
        yield Sample(args=(q, *rest), name=f"{quant} {tokens}x48x256 of codes", quant={1: quant})
    wide = torch.randn(4, 300, generator=g)
    w = torch.randn(24, 64, generator=g) / 8
    yield Sample(args=(wide[:, 100:164], w, None, wide[:, :24]), name="strided rows", quant={1: "float32"})


OP = register(
    Op(
        name="linear_add",
        schema=(
            "linear_add(Tensor x, Tensor weight, Tensor? bias, Tensor residual, float? x_scale=None, "
            "str? x_codes=None) -> Tensor"
        ),
        reference=reference,
        shape_rule=shape_rule,
        samples=samples,
        tolerance={
            "float32": 1e-5,
            "bfloat16": 1e-2,
            "int8": 2e-2,
            "fp8": 6e-2,
            "float16_sums": float16_sums.PRODUCT,
        },
        optional=True,
    )
)
