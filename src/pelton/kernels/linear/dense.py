"""Native products with dense weights, float32 activations (``csrc/gemm_f32.h``)."""

from __future__ import annotations

from pelton.kernels.linear.operands import float_input
from pelton.kernels.tactic import Tactic


def _tactic(dtype: str) -> Tactic:
    return Tactic(
        name=f"cpu.linear.{dtype}.x16",
        op="linear",
        supports=lambda node: float_input(node, dtype),
        priority=10,
        batch_invariant=True,
        weight_layouts={1: "x16"},
    )


TACTICS = [_tactic(dtype) for dtype in ("float32", "bfloat16", "float16")]
