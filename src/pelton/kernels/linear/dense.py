"""Native products with dense weights, float32 activations (``csrc/gemm_f32.h``)."""

from __future__ import annotations

from pelton.kernels.tactic import NodeSpec, Tactic


def _supports(node: NodeSpec, dtype: str) -> bool:
    x, weight, *rest = node.inputs
    plain = all(t is None or t.dtype == "float32" for t in (x, *rest))
    return plain and weight is not None and (weight.quant or weight.dtype) == dtype


def _tactic(dtype: str) -> Tactic:
    return Tactic(
        name=f"cpu.linear.{dtype}.x16",
        op="linear",
        supports=lambda node: _supports(node, dtype),
        priority=10,
        batch_invariant=True,
        weight_layouts={1: "x16"},
    )


TACTICS = [_tactic(dtype) for dtype in ("float32", "bfloat16", "float16")]
