"""Native gated products: a panel of gate and of up at a time (``csrc/gemm_linear.h``)."""

from __future__ import annotations

from pelton.dtypes import NATIVE_BLOCK_TYPES
from pelton.kernels.linear.operands import UNPACKED, float_input, gated
from pelton.kernels.linear.workspace import int8_workspace
from pelton.kernels.tactic import Tactic


def _int8(quant: str, suffix: str = "", priority: int = 20) -> Tactic:
    return Tactic(
        name=f"cpu.linear_gated.{quant}.x16.int8{suffix}",
        op="linear_gated",
        supports=lambda node: node.activations == "int8" and float_input(node, quant) and gated(node),
        priority=priority,
        precision="int8",
        batch_invariant=True,
        weight_layouts={1: "x16"},
        workspace=int8_workspace,
    )


def _float32(quant: str, suffix: str) -> Tactic:
    return Tactic(
        name=f"cpu.linear_gated.{quant}.x16{suffix}",
        op="linear_gated",
        supports=lambda node: float_input(node, quant) and gated(node),
        priority=10,
        batch_invariant=True,
        weight_layouts={1: "x16"},
    )


TACTICS = [
    *(_int8(quant) for quant in NATIVE_BLOCK_TYPES),
    *(_int8(quant, UNPACKED, 19) for quant in NATIVE_BLOCK_TYPES),
    *(_float32(quant, ".f32") for quant in NATIVE_BLOCK_TYPES),
    *(_float32(dtype, "") for dtype in ("float32", "bfloat16", "float16")),
]
