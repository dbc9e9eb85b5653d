"""linear_q8: ``linear`` on an input that ``quantize_q8`` made."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pelton.dtypes import BLOCK_TYPES, NATIVE_BLOCK_TYPES
from pelton.ir.op import Op, Sample, register
from pelton.ir.ops import linear, quantize_q8


def reference(x_q8: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x_q8``: uint8 (T, K / 32 * 44); ``weight``: (N, K); ``bias``: (N,) or None -> float32 (T, N)."""
    return linear.reference(quantize_q8.dequantize(x_q8), weight, bias)


def shape_rule(x_q8: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    columns = x_q8.shape[1] // quantize_q8.BLOCK_BYTES * quantize_q8.BLOCK
    assert columns == weight.shape[1], f"{columns} quantised columns, a weight of {weight.shape[1]}"
    return x_q8.new_empty((x_q8.shape[0], weight.shape[0]), dtype=torch.float32)


def samples(g: torch.Generator) -> Iterator[Sample]:
    for tokens, n, k in ((1, 48, 64), (2, 64, 256), (5, 31, 512), (33, 100, 288)):
        x = torch.randn(tokens, k, generator=g)
        w = torch.randn(n, k, generator=g) * k**-0.5
        b = torch.randn(n, generator=g) if n % 2 else None
        for quant in NATIVE_BLOCK_TYPES:
            if quant in BLOCK_TYPES and k % BLOCK_TYPES[quant].block_size:
                continue
            yield Sample(
                args=(quantize_q8.reference(x), w, b), name=f"{quant} {tokens}x{n}x{k}", quant={1: quant}
            )


OP = register(
    Op(
        name="linear_q8",
        schema="linear_q8(Tensor x_q8, Tensor weight, Tensor? bias=None) -> Tensor",
        reference=reference,
        shape_rule=shape_rule,
        samples=samples,
        tolerance={"float32": 1e-5, "int8": 1e-5},
        optional=True,
    )
)
