"""Native gathers of table rows, as they are or in the tied head's layout (``csrc/quant_embedding.cpp``)."""

from __future__ import annotations

from pelton.dtypes import NATIVE_BLOCK_TYPES
from pelton.kernels.tactic import NodeSpec, Tactic


def _supports(node: NodeSpec, quant: str) -> bool:
    weight = node.inputs[1]
    return weight is not None and (weight.quant or weight.dtype) == quant


def _tactic(quant: str, layout: str, priority: int) -> Tactic:
    return Tactic(
        name=f"cpu.embedding.{quant}.{layout}",
        op="embedding",
        supports=lambda node: _supports(node, quant),
        priority=priority,
        batch_invariant=True,
        weight_layouts={1: layout},
    )


TACTICS = [
    _tactic(quant, layout, priority)
    for quant in (*NATIVE_BLOCK_TYPES, "float32", "bfloat16", "float16")
    for layout, priority in (("rows", 10), ("x16", 5))
]
