"""copy: the same values in contiguous memory: a transposed view that another op reads."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pelton.ir.op import Op, Sample, register


def reference(x: torch.Tensor) -> torch.Tensor:
    """``x``: up to four axes, any strides, any dtype."""
    return x.clone(memory_format=torch.contiguous_format)


def shape_rule(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


def samples(g: torch.Generator) -> Iterator[Sample]:
    x = torch.randn(5, 4, 6, 33, generator=g)
    yield Sample(args=(x[:, :, 2],), name="rows")
    yield Sample(args=(x.transpose(1, 3),), name="transposed")
    yield Sample(args=(x.permute(0, 3, 1, 2)[:, 1:],), name="permuted")
    yield Sample(args=(x[:, 0, 0, ::2],), name="every second")
    yield Sample(args=(x[:, 0, 0, :1].expand(5, 7),), name="expanded")
    yield Sample(args=(torch.arange(40, dtype=torch.int32)[::3],), name="int32 vector")


OP = register(
    Op(
        name="copy",
        schema="copy(Tensor x) -> Tensor",
        reference=reference,
        shape_rule=shape_rule,
        samples=samples,
        tolerance={"float32": 0.0, "bfloat16": 0.0},
        any_strides=True,
    )
)
