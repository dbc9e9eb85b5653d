"""dequantize_q8: what ``quantize_q8`` made, as float32 again.

It stands in a graph only between passes: ``move_quantise`` takes it into the products (``linear_q8``),
whose sums of integers are scaled once a block.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pelton.ir.op import Op, Sample, register
from pelton.ir.ops import quantize_q8


def reference(x_q8: torch.Tensor) -> torch.Tensor:
    """``x_q8``: uint8 (T, K / 32 * 44) -> float32 (T, K)."""
    return quantize_q8.dequantize(x_q8)


def shape_rule(x_q8: torch.Tensor) -> torch.Tensor:
    columns = x_q8.shape[1] // quantize_q8.BLOCK_BYTES * quantize_q8.BLOCK
    return x_q8.new_empty((x_q8.shape[0], columns), dtype=torch.float32)


def samples(g: torch.Generator) -> Iterator[Sample]:
    x = torch.randn(3, 96, generator=g)
    yield Sample(args=(quantize_q8.reference(x),), name="3x96")


OP = register(
    Op(
        name="dequantize_q8",
        schema="dequantize_q8(Tensor x_q8) -> Tensor",
        reference=reference,
        shape_rule=shape_rule,
        samples=samples,
        tolerance={"float32": 1e-6},
        optional=True,
    )
)
