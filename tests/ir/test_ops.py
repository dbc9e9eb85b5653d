"""Every op: its shape rule says what its reference gives; what the fused ones are made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pelton.ir.op import all_ops
from pelton.ir.ops import quantize_q8


def results(value: Any) -> list[torch.Tensor]:
    return list(value) if isinstance(value, tuple) else [] if value is None else [value]


@pytest.mark.parametrize("name", sorted(all_ops()))
def test_the_shape_rule_says_what_the_reference_gives(name: str) -> None:
    op = all_ops()[name]
    for sample in list(op.samples(torch.Generator().manual_seed(0)))[:6]:
        got, want = results(op.reference(*sample.args)), results(op.shape_rule(*sample.args))
        assert [(t.shape, t.dtype) for t in got] == [(t.shape, t.dtype) for t in want], sample.name


def test_quantised_rows_are_within_half_a_step() -> None:
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(0))
    back = quantize_q8.dequantize(quantize_q8.reference(x))
    step = x.reshape(5, 3, 32).abs().amax(-1, keepdim=True) / 127
    assert ((back - x).reshape(5, 3, 32).abs() <= step * 0.5001).all()


def test_what_is_not_finite_stays_so() -> None:
    x = torch.randn(2, 64)
    x[1, 40] = float("inf")
    back = quantize_q8.dequantize(quantize_q8.reference(x))
    assert back[1, 32:].isnan().all()
    assert back[0].isfinite().all() and back[1, :32].isfinite().all()
