"""linear_gated_q8: ``linear_gated`` on an input that ``quantize_q8`` made."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pelton.ir.op import Op, Sample, register
from pelton.ir.ops import linear_gated, quantize_q8


def reference(x_q8: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, kind: str) -> torch.Tensor:
    """``x_q8``: uint8 (T, K / 32 * 44); the rest as in ``linear_gated`` -> float32 (T, I)."""
    return linear_gated.reference(quantize_q8.dequantize(x_q8), weight, bias, kind)


def shape_rule(
    x_q8: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, kind: str
) -> torch.Tensor:
    columns = x_q8.shape[1] // quantize_q8.BLOCK_BYTES * quantize_q8.BLOCK
    assert columns == weight.shape[1], f"{columns} quantised columns, a weight of {weight.shape[1]}"
    return x_q8.new_empty((x_q8.shape[0], weight.shape[0] // 2), dtype=torch.float32)


def samples(g: torch.Generator) -> Iterator[Sample]:
    for sample in linear_gated.samples(g):
        if len(sample.args) > 4:  # inputs that are rounded otherwise
            continue
        if sample.quant[1] not in ("float32", "bfloat16", "float16"):
            x, *rest = sample.args
            yield Sample(args=(quantize_q8.reference(x), *rest), name=sample.name, quant=sample.quant)


OP = register(
    Op(
        name="linear_gated_q8",
        schema="linear_gated_q8(Tensor x_q8, Tensor weight, Tensor? bias, str kind) -> Tensor",
        reference=reference,
        shape_rule=shape_rule,
        samples=samples,
        tolerance={"float32": 2e-5, "int8": 2e-5},
        optional=True,
    )
)
