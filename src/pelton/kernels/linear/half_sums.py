"""Products whose tensor cores add in float16, for builds that ask for it (``triton_gemm.py``, HALF_SUMS).

The sum of every ``float16_sums.COLUMNS`` columns is in float16; these are added in float32. cuBLASLt's
(COMPUTE_16F) are none of them: a row's whole sum is in float16 there, whose errors grow with its columns.
"""

from __future__ import annotations

from dataclasses import replace

from pelton.kernels.linear.packed import LAYOUT, supports_packed, unpacked, unpacked_bytes
from pelton.kernels.linear.products import Form, gemm, normed_workspace, supports_dense
from pelton.kernels.tactic import SMALL_STEPS, NodeSpec, Tactic


def _supports(node: NodeSpec) -> bool:
    """x of as many rows as the step has tokens: logits (N) are of few, whose product memory bounds."""
    x = node.inputs[0]
    assert x is not None
    return x.dtype == "float16" and x.shape[0] != "N"


def _supports_dense(form: Form, node: NodeSpec) -> bool:
    weight = node.inputs[1]
    assert weight is not None
    return _supports(node) and supports_dense(form, node) and (weight.quant or weight.dtype) == "float16"


def half_sums_tactics(op: str, form: Form) -> list[Tactic]:
    """The tactics of ``op``: of dense weights, and of packed ones, which become dense rows first."""
    dense = Tactic(
        name=f"cuda.{op}.half_sums",
        op=op,
        device="cuda",
        supports=lambda node: _supports_dense(form, node),
        priority=70,
        precision="float16_sums",
        sums="float16",
        above=SMALL_STEPS,
        workspace=normed_workspace(form),
        launches=lambda call, tokens: gemm(form, call, tokens, half_sums=True),
    )
    packed = replace(
        dense,
        name=f"cuda.{op}.unpack_half_sums",
        supports=lambda node: _supports(node) and supports_packed(form, node),
        weight_layouts={1: LAYOUT},
        workspace=lambda node, tokens: unpacked_bytes(form, node, tokens),
        launches=lambda call, tokens: unpacked(form, call, tokens, half_sums=True),
    )
    return [dense, packed]
