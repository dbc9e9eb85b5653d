"""Native products with block-quantised weights (``csrc/gemm_int8.h``, ``csrc/gemm_f32.h``)."""

from __future__ import annotations

from pelton.dtypes import NATIVE_BLOCK_TYPES
from pelton.kernels.linear.operands import UNPACKED, float_input
from pelton.kernels.linear.workspace import int8_workspace
from pelton.kernels.tactic import Tactic


def _int8(quant: str, suffix: str = "", priority: int = 20) -> Tactic:
    return Tactic(
        name=f"cpu.linear.{quant}.x16.int8{suffix}",
        op="linear",
        supports=lambda node: node.activations == "int8" and float_input(node, quant),
        priority=priority,
        precision="int8",
        batch_invariant=True,
        weight_layouts={1: "x16"},
        workspace=int8_workspace,
    )


def _float32(quant: str) -> Tactic:
    return Tactic(
        name=f"cpu.linear.{quant}.x16.f32",
        op="linear",
        supports=lambda node: float_input(node, quant),
        priority=10,
        batch_invariant=True,
        weight_layouts={1: "x16"},
    )


TACTICS = [
    tactic
    for quant in NATIVE_BLOCK_TYPES
    for tactic in (_int8(quant), _int8(quant, UNPACKED, 19), _float32(quant))
]
