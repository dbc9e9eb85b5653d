"""Scratch that the int8 products need (``csrc/gemm_int8.h``)."""

from __future__ import annotations

from pelton.kernels.tactic import NodeSpec

#: Quantised activations: 32 int8 values and 12 bytes of scale and sums per token and 32 columns.
_BYTES_PER_BLOCK = 44


def int8_bytes(tokens: int, cols: int) -> int:
    """Bytes for ``tokens`` quantised rows of ``cols`` columns."""
    return tokens * -(-cols // 32) * _BYTES_PER_BLOCK


def int8_workspace(node: NodeSpec, max_tokens: int) -> int:
    """``Tactic.workspace`` of products (weight at input 1) that quantise their input themselves."""
    weight = node.inputs[1]
    assert weight is not None
    return int8_bytes(max_tokens, int(weight.shape[-1]))
