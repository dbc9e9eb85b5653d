"""linear_gated: ``act(gate(x)) * up(x)``, the products of gate and up and their activation in one op."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pelton.dtypes import BLOCK_TYPES, PACKED_TYPES
from pelton.ir import float16_sums
from pelton.ir.op import Op, Sample, register
from pelton.ir.ops import gated_activation, linear
from pelton.ir.static_codes import STATIC_SAMPLES, left, result_dtype, scale_of


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    kind: str,
    x_scale: float | None = None,
    x_codes: str | None = None,
    y_scale: float | None = None,
    y_codes: str | None = None,
) -> torch.Tensor:
    """``x``: (T, K); ``weight``: (2 I, K), the gate's rows first; ``bias``: (2 I,) or None; ``kind`` as
    in ``activation``; ``x_scale``, ``x_codes``: as in ``linear`` -> (T, I), as codes where ``y_scale`` and
    ``y_codes`` say so (``ir/static_codes.py``)."""
    gate, up = linear.reference(x, weight, bias, x_scale, x_codes).chunk(2, -1)
    return left(gated_activation.reference(gate, up, kind), y_scale, y_codes)


def shape_rule(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    kind: str,
    x_scale: float | None = None,
    x_codes: str | None = None,
    y_scale: float | None = None,
    y_codes: str | None = None,
) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0] // 2), dtype=result_dtype(x, y_codes))


def samples(g: torch.Generator) -> Iterator[Sample]:
    shapes = ((1, 32, 64, "silu"), (2, 33, 256, "gelu_tanh"), (9, 48, 512, "silu"), (67, 40, 256, "gelu"))
    for tokens, i, k, kind in shapes:
        x = torch.randn(tokens, k, generator=g)
        w = torch.randn(2 * i, k, generator=g) * k**-0.5
        b = torch.randn(2 * i, generator=g) if i % 2 else None
        for quant in ("float32", "bfloat16", "float16", *PACKED_TYPES):
            if quant in BLOCK_TYPES and k % BLOCK_TYPES[quant].block_size:
                continue
            yield Sample(args=(x, w, b, kind), name=f"{quant} {tokens}x{i}x{k} {kind}", quant={1: quant})

    for tokens, (quant, codes) in STATIC_SAMPLES:
        x, w = torch.randn(tokens, 256, generator=g), torch.randn(96, 256, generator=g) / 16
        args = (x, w, None, "silu", scale_of(x, codes), codes)
        yield Sample(args=args, name=f"{quant} {tokens}x48x256 static", quant={1: quant})
        y_scale = scale_of(reference(*args), codes) / 2  # clips
        name = f"{quant} {tokens}x48x256 static, to codes"
        yield Sample(args=(*args, y_scale, codes), name=name, quant={1: quant})


OP = register(
    Op(
        name="linear_gated",
        schema=(
            "linear_gated(Tensor x, Tensor weight, Tensor? bias, str kind, float? x_scale=None, "
            "str? x_codes=None, float? y_scale=None, str? y_codes=None) -> Tensor"
        ),
        reference=reference,
        shape_rule=shape_rule,
        samples=samples,
        tolerance={
            "float32": 2e-5,
            "bfloat16": 2e-2,
            "int8": 3e-2,
            "fp8": 1.2e-1,
            "float16_sums": float16_sums.gated(float16_sums.PRODUCT),
        },
        optional=True,
    )
)
