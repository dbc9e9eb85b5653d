"""linear: ``y = x @ weight.T (+ bias)``; the weight may be quantised in an engine."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pelton.dtypes import BLOCK_TYPES, PACKED_TYPES
from pelton.ir import float16_sums
from pelton.ir.op import Op, Sample, register
from pelton.ir.static_codes import STATIC_SAMPLES, rounded, scale_of


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    x_scale: float | None = None,
    x_codes: str | None = None,
) -> torch.Tensor:
    """``x``: (T, K), any row stride; ``weight``: (N, K); ``bias``: (N,) or None -> (T, N).

    ``x_scale``, ``x_codes``: how x is rounded (``ir/static_codes.py``); None: not.
    """
    out = rounded(x, x_scale, x_codes).float() @ weight.float().t()
    if bias is not None:
        out = out + bias.float()
    return out.to(x.dtype)


def shape_rule(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    x_scale: float | None = None,
    x_codes: str | None = None,
) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


def samples(g: torch.Generator) -> Iterator[Sample]:
    shapes = (
        (1, 48, 64),
        (1, 33, 96),
        (2, 64, 256),
        (5, 31, 512),
        (8, 40, 256),
        (33, 100, 288),
        (67, 49, 256),
    )
    for tokens, n, k in shapes:
        x = torch.randn(tokens, k, generator=g)
        w = torch.randn(n, k, generator=g) * k**-0.5
        b = torch.randn(n, generator=g) if n % 2 else None
        for quant in ("float32", "bfloat16", "float16", *PACKED_TYPES):
            if quant in BLOCK_TYPES and k % BLOCK_TYPES[quant].block_size:
                continue
            yield Sample(args=(x, w, b), name=f"{quant} {tokens}x{n}x{k}", quant={1: quant})
    for tokens, (quant, codes) in STATIC_SAMPLES:
        x, w = torch.randn(tokens, 256, generator=g), torch.randn(48, 256, generator=g) / 16
        args = (x, w, torch.randn(48, generator=g), scale_of(x, codes), codes)
        yield Sample(args=args, name=f"{quant} {tokens}x48x256 static", quant={1: quant})
    wide = torch.randn(4, 300, generator=g)
    yield Sample(
        args=(wide[:, 100:164], torch.randn(24, 64, generator=g), None),
        name="strided rows",
        quant={1: "q8_0"},
    )


OP = register(
    Op(
        name="linear",
        schema=(
            "linear(Tensor x, Tensor weight, Tensor? bias=None, float? x_scale=None, str? x_codes=None) "
            "-> Tensor"
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
    )
)
