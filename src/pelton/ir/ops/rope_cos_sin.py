"""rope_cos_sin: the rotation of each position, computed once per step and shared by layers."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pelton.ir.op import Op, Sample, register


def reference(positions: torch.Tensor, inv_freq: torch.Tensor, scale: float) -> torch.Tensor:
    """``positions``: (T,) int32; ``inv_freq``: (R/2,) float32 -> (T, R) float32.

    Row t is ``[cos(p_t f_0..), sin(p_t f_0..)] * scale``; ``scale`` is YaRN's attention factor.
    """
    angle = positions.float()[:, None] * inv_freq.float()[None, :]
    return torch.cat([angle.cos(), angle.sin()], dim=-1) * scale


def shape_rule(positions: torch.Tensor, inv_freq: torch.Tensor, scale: float) -> torch.Tensor:
    return inv_freq.new_empty((positions.shape[0], 2 * inv_freq.shape[0]))


def samples(g: torch.Generator) -> Iterator[Sample]:
    inv_freq = 10000.0 ** -(torch.arange(0, 64, 2) / 64)
    for positions in ([0], [5, 1, 100, 8191], [131071, 131072]):
        p = torch.tensor(positions, dtype=torch.int32)
        yield Sample(args=(p, inv_freq, 1.0), name=f"{positions}")
    yield Sample(args=(p, inv_freq, 1.2), name="scaled")


OP = register(
    Op(
        name="rope_cos_sin",
        schema="rope_cos_sin(Tensor positions, Tensor inv_freq, float scale) -> Tensor",
        reference=reference,
        shape_rule=shape_rule,
        samples=samples,
        tolerance={"float32": 2e-6, "bfloat16": 1e-2},
    )
)
