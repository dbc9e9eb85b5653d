"""Scratch that the int8 products need (``csrc/gemm_int8.h``)."""

from __future__ import annotations

#: Quantised activations: 32 int8 values and three 4-byte fields per token and 32 columns.
_BYTES_PER_BLOCK = 44


def int8_bytes(tokens: int, cols: int) -> int:
    """Bytes for ``tokens`` quantised rows of ``cols`` columns."""
    return tokens * -(-cols // 32) * _BYTES_PER_BLOCK
