"""norm_linear_gated: ``act(gate(y)) * up(y)`` of ``y = rms_norm(x)``: the first half of an MLP."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pelton.ir import float16_sums
from pelton.ir.op import Op, Sample, register
from pelton.ir.ops import linear_gated, rms_norm
from pelton.ir.static_codes import STATIC_SAMPLES, result_dtype, scale_of


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    kind: str,
    norm_weight: torch.Tensor,
    eps: float,
    x_scale: float | None = None,
    x_codes: str | None = None,
    y_scale: float | None = None,
    y_codes: str | None = None,
) -> torch.Tensor:
    """``x``: (T, K); ``weight``: (2 I, K), the gate's rows first; ``bias``: (2 I,) or None; ``kind`` as
    in ``activation``; ``norm_weight``: (K,); ``x_scale``, ``x_codes``: of normed x, as in ``linear``;
    ``y_scale``, ``y_codes``: as in ``linear_gated`` -> (T, I)."""
    normed = rms_norm.reference(x, norm_weight, eps)
    return linear_gated.reference(normed, weight, bias, kind, x_scale, x_codes, y_scale, y_codes)


def shape_rule(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    kind: str,
    norm_weight: torch.Tensor,
    eps: float,
    x_scale: float | None = None,
    x_codes: str | None = None,
    y_scale: float | None = None,
    y_codes: str | None = None,
) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0] // 2), dtype=result_dtype(x, y_codes))


def samples(g: torch.Generator) -> Iterator[Sample]:
    shapes = (
        (1, 32, 64, "silu"),
        (1, 33, 96, "gelu"),
        (2, 33, 256, "gelu_tanh"),
        (9, 48, 200, "silu"),
        (67, 40, 256, "silu"),
    )
    for tokens, i, k, kind in shapes:
        x = torch.randn(tokens, k, generator=g) * 3
        w = torch.randn(2 * i, k, generator=g) * k**-0.5
        b = torch.randn(2 * i, generator=g) if i % 2 else None
        norm = torch.rand(k, generator=g) + 0.5
        yield Sample(args=(x, w, b, kind, norm, 1e-5), name=f"{tokens}x{i}x{k} {kind}", quant={1: "float32"})
    for quant in ("int4_g128", "fp8_row", "fp8_g128", "q4_k", "q6_k"):
        x, norm = torch.randn(5, 256, generator=g) * 3, torch.rand(256, generator=g) + 0.5
        w = torch.randn(96, 256, generator=g) / 16
        yield Sample(args=(x, w, None, "silu", norm, 1e-5), name=f"{quant} 5x48x256 silu", quant={1: quant})
    # Where kernels on GPUs share columns between blocks, and where they have many tokens.
    for tokens, i, k in ((134, 72, 1152), (700, 136, 192)):
        x, norm = torch.randn(tokens, k, generator=g) * 3, torch.rand(k, generator=g) + 0.5
        w = torch.randn(2 * i, k, generator=g) * k**-0.5
        name = f"{tokens}x{i}x{k} silu"
        yield Sample(args=(x, w, None, "silu", norm, 1e-5), name=name, quant={1: "float32"})

    for tokens, (quant, codes) in STATIC_SAMPLES:
        x, norm = torch.randn(tokens, 256, generator=g) * 3, torch.rand(256, generator=g) + 0.5
        w, scale = torch.randn(96, 256, generator=g) / 16, scale_of(rms_norm.reference(x, norm, 1e-5), codes)
        args = (x, w, None, "silu", norm, 1e-5, scale, codes)
        yield Sample(args=args, name=f"{quant} {tokens}x48x256 static", quant={1: quant})
        y_scale = scale_of(reference(*args), codes) / 2  # clips
        name = f"{quant} {tokens}x48x256 static, to codes"
        yield Sample(args=(*args, y_scale, codes), name=name, quant={1: quant})


OP = register(
    Op(
        name="norm_linear_gated",
        schema=(
            "norm_linear_gated(Tensor x, Tensor weight, Tensor? bias, str kind, Tensor norm_weight, "
            "float eps, float? x_scale=None, str? x_codes=None, float? y_scale=None, "
            "str? y_codes=None) -> Tensor"
        ),
        reference=reference,
        shape_rule=shape_rule,
        samples=samples,
        tolerance={
            "float32": 2e-5,
            "bfloat16": 2e-2,
            "int8": 3e-2,
            "fp8": 1.2e-1,
            "float16_sums": float16_sums.gated(float16_sums.NORMED),
        },
        optional=True,
    )
)
