"""norm_linear: ``y = rms_norm(x) @ weight.T (+ bias)``, a norm that one product alone reads."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pelton.ir import float16_sums
from pelton.ir.op import Op, Sample, register
from pelton.ir.ops import linear, rms_norm
from pelton.ir.static_codes import STATIC_SAMPLES, scale_of


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    x_scale: float | None = None,
    x_codes: str | None = None,
) -> torch.Tensor:
    """``x``: (T, K); ``weight``: (N, K); ``bias``: (N,) or None; ``norm_weight``: (K,); ``x_scale``,
    ``x_codes``: of normed x, as in ``linear`` -> (T, N)."""
    return linear.reference(rms_norm.reference(x, norm_weight, eps), weight, bias, x_scale, x_codes)


def shape_rule(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    x_scale: float | None = None,
    x_codes: str | None = None,
) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


def samples(g: torch.Generator) -> Iterator[Sample]:
    shapes = ((1, 48, 64), (1, 33, 96), (2, 64, 256), (9, 40, 200), (33, 100, 288), (67, 49, 256))
    for tokens, n, k in shapes:
        x = torch.randn(tokens, k, generator=g) * 3
        w = torch.randn(n, k, generator=g) * k**-0.5
        b = torch.randn(n, generator=g) if n % 2 else None
        norm = torch.rand(k, generator=g) + 0.5
        yield Sample(args=(x, w, b, norm, 1e-5), name=f"{tokens}x{n}x{k}", quant={1: "float32"})
    for quant in ("int4_g128", "fp8_row", "fp8_g128", "q4_k", "q6_k"):
        x, norm = torch.randn(5, 256, generator=g) * 3, torch.rand(256, generator=g) + 0.5
        w = torch.randn(48, 256, generator=g) / 16
        yield Sample(args=(x, w, None, norm, 1e-5), name=f"{quant} 5x48x256", quant={1: quant})
    # Where kernels on GPUs share columns between blocks.
    x, norm = torch.randn(134, 1152, generator=g) * 3, torch.rand(1152, generator=g) + 0.5
    w = torch.randn(72, 1152, generator=g) / 32
    yield Sample(args=(x, w, None, norm, 1e-5), name="134x72x1152", quant={1: "float32"})
    for tokens, (quant, codes) in STATIC_SAMPLES:
        x, norm = torch.randn(tokens, 256, generator=g) * 3, torch.rand(256, generator=g) + 0.5
        w, scale = torch.randn(48, 256, generator=g) / 16, scale_of(rms_norm.reference(x, norm, 1e-5), codes)
        args = (x, w, None, norm, 1e-5, scale, codes)
        yield Sample(args=args, name=f"{quant} {tokens}x48x256 static", quant={1: quant})
    wide = torch.randn(4, 300, generator=g)
    w, norm = torch.randn(24, 64, generator=g) / 8, torch.rand(64, generator=g)
    yield Sample(args=(wide[:, 100:164], w, None, norm, 1e-6), name="strided rows", quant={1: "float32"})


OP = register(
    Op(
        name="norm_linear",
        schema=(
            "norm_linear(Tensor x, Tensor weight, Tensor? bias, Tensor norm_weight, float eps, "
            "float? x_scale=None, str? x_codes=None) -> Tensor"
        ),
        reference=reference,
        shape_rule=shape_rule,
        samples=samples,
        tolerance={
            "float32": 1e-5,
            "bfloat16": 1e-2,
            "int8": 2e-2,
            "fp8": 8e-2,
            "float16_sums": float16_sums.NORMED,
        },
        optional=True,
    )
)
