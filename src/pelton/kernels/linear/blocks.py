"""Native products with block-quantised weights (``csrc/gemm_int8.h``, ``csrc/gemm_f32.h``)."""

from __future__ import annotations

from pelton.dtypes import NATIVE_BLOCK_TYPES
from pelton.kernels.linear.workspace import int8_bytes
from pelton.kernels.tactic import NodeSpec, Tactic


def _operands(node: NodeSpec, quant: str) -> bool:
    x, weight, *rest = node.inputs
    plain = all(t is None or t.dtype == "float32" for t in (x, *rest))
    return plain and weight is not None and weight.quant == quant


def _cols(node: NodeSpec) -> int:
    weight = node.inputs[1]
    assert weight is not None
    return int(weight.shape[-1])


def _int8(quant: str) -> Tactic:
    return Tactic(
        name=f"cpu.linear.{quant}.x16.int8",
        op="linear",
        supports=lambda node: node.activations == "int8" and _operands(node, quant),
        priority=20,
        precision="int8",
        batch_invariant=True,
        weight_layouts={1: "x16"},
        workspace=lambda node, max_tokens: int8_bytes(max_tokens, _cols(node)),
    )


def _float32(quant: str) -> Tactic:
    return Tactic(
        name=f"cpu.linear.{quant}.x16.f32",
        op="linear",
        supports=lambda node: _operands(node, quant),
        priority=10,
        batch_invariant=True,
        weight_layouts={1: "x16"},
    )


TACTICS = [make(quant) for quant in NATIVE_BLOCK_TYPES for make in (_int8, _float32)]
