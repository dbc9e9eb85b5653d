"""Pelton's ops as functions: what a model's ``forward`` calls besides views, ``+`` and ``*``.

Each is one ``torch.ops.pelton`` op: eagerly its reference runs, traced it becomes one node. Shapes
are those of the op's file in ``pelton.ir.ops``.
"""

from __future__ import annotations

from typing import Any

import torch

import pelton.ir.ops  # noqa: F401  registers the ops

_ops: Any = torch.ops.pelton


def embedding(ids_T: Any, weight: Any) -> Any:
    """Rows ``ids_T`` of ``weight`` (V, D) -> (T, D)."""
    return _ops.embedding(ids_T, weight)


def linear(x_TD: Any, weight: Any, bias: Any | None = None) -> Any:
    """``x @ weight.T + bias``; weight (out, in) -> (T, out)."""
    return _ops.linear(x_TD, weight, bias)


def rms_norm(x: Any, weight: Any, eps: float) -> Any:
    """Root-mean-square norm over the last axis."""
    return _ops.rms_norm(x, weight, eps)


def layer_norm(x_TD: Any, weight: Any, bias: Any, eps: float) -> Any:
    """Layer norm over the last axis."""
    return _ops.layer_norm(x_TD, weight, bias, eps)


def activation(x_TD: Any, kind: str) -> Any:
    """``kind``: silu, gelu, gelu_tanh or relu."""
    return _ops.activation(x_TD, kind)


def gated_activation(gate_TD: Any, up_TD: Any, kind: str) -> Any:
    """``act(gate) * up``."""
    return _ops.gated_activation(gate_TD, up_TD, kind)


def softcap(x: Any, cap: float) -> Any:
    """``cap * tanh(x / cap)``."""
    return _ops.softcap(x, cap)


def rope_cos_sin(positions_T: Any, inv_freq: Any, scale: float = 1.0) -> Any:
    """Rotation of each position -> (T, R)."""
    return _ops.rope_cos_sin(positions_T, inv_freq, scale)


def rope(x_THD: Any, cos_sin_TR: Any) -> Any:
    """Rotary embedding of the first R of D dimensions."""
    return _ops.rope(x_THD, cos_sin_TR)


def kv_write(k_THD: Any, v_THD: Any, k_cache: Any, v_cache: Any, slot_mapping_T: Any) -> None:
    """Store this step's keys and values; an ordered effect."""
    _ops.kv_write(k_THD, v_THD, k_cache, v_cache, slot_mapping_T)


def paged_attention(
    q_THD: Any,
    k_cache: Any,
    v_cache: Any,
    block_table_BM: Any,
    cu_seqlens: Any,
    seq_lens_B: Any,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> Any:
    """Causal attention over the paged cache -> (T, H, D)."""
    return _ops.paged_attention(
        q_THD, k_cache, v_cache, block_table_BM, cu_seqlens, seq_lens_B, scale, window, softcap
    )


def take_rows(x_TD: Any, index_N: Any) -> Any:
    """``x[index]`` -> (N, D)."""
    return _ops.take_rows(x_TD, index_N)
