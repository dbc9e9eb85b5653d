"""Native products that read quantised rows (``csrc/gemm_linear.h``)."""

from __future__ import annotations

from pelton.dtypes import NATIVE_BLOCK_TYPES
from pelton.kernels.linear.operands import UNPACKED, quantised_input
from pelton.kernels.tactic import Tactic


def _tactic(quant: str, suffix: str = "", priority: int = 20) -> Tactic:
    return Tactic(
        name=f"cpu.linear_q8.{quant}.x16{suffix}",
        op="linear_q8",
        supports=lambda node: quantised_input(node, quant),
        priority=priority,
        batch_invariant=True,
        weight_layouts={1: "x16"},
    )


TACTICS = [
    tactic for quant in NATIVE_BLOCK_TYPES for tactic in (_tactic(quant), _tactic(quant, UNPACKED, 19))
]
