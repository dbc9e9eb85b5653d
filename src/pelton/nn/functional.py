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


def layer_norm(x: Any, weight: Any | None, bias: Any | None, eps: float) -> Any:
    """Layer norm over the last axis; weight and bias (D) are optional."""
    return _ops.layer_norm(x, weight, bias, eps)


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
    sinks_H: Any | None = None,
) -> Any:
    """Causal attention over the paged cache -> (T, H, D)."""
    step = block_table_BM, cu_seqlens, seq_lens_B
    return _ops.paged_attention(q_THD, k_cache, v_cache, *step, scale, window, softcap, *[None] * 4, sinks_H)


def to_float32(x: Any) -> Any:
    """``x`` as float32."""
    return _ops.to_float32(x)


def take_rows(x_TD: Any, index_N: Any) -> Any:
    """``x[index]`` -> (N, D)."""
    return _ops.take_rows(x_TD, index_N)


# ---- Arithmetic ----
# Named as in torch; plain PyTorch (``x * y``, ``torch.exp(x)``, ``x.mean(-1)``) becomes the same ops.


def abs(x: Any) -> Any:
    """``|x|``."""
    return _ops.unary(x, "abs")


def exp(x: Any) -> Any:
    """e to the power of x."""
    return _ops.unary(x, "exp")


def log(x: Any) -> Any:
    """Natural logarithm."""
    return _ops.unary(x, "log")


def sqrt(x: Any) -> Any:
    """Square root."""
    return _ops.unary(x, "sqrt")


def rsqrt(x: Any) -> Any:
    """``1 / sqrt(x)``."""
    return _ops.unary(x, "rsqrt")


def reciprocal(x: Any) -> Any:
    """``1 / x``."""
    return _ops.unary(x, "reciprocal")


def square(x: Any) -> Any:
    """``x * x``."""
    return _ops.unary(x, "square")


def sin(x: Any) -> Any:
    """Sine of radians."""
    return _ops.unary(x, "sin")


def cos(x: Any) -> Any:
    """Cosine of radians."""
    return _ops.unary(x, "cos")


def tanh(x: Any) -> Any:
    """Hyperbolic tangent."""
    return _ops.unary(x, "tanh")


def sigmoid(x: Any) -> Any:
    """``1 / (1 + exp(-x))``."""
    return _ops.unary(x, "sigmoid")


def silu(x: Any) -> Any:
    """``x * sigmoid(x)``."""
    return _ops.activation(x, "silu")


def relu(x: Any) -> Any:
    """``max(x, 0)``."""
    return _ops.activation(x, "relu")


def gelu(x: Any, approximate: str = "none") -> Any:
    """``x`` times the normal distribution's function; ``approximate``: none or tanh."""
    return _ops.activation(x, "gelu_tanh" if approximate == "tanh" else "gelu")


def maximum(x: Any, y: Any) -> Any:
    """The larger of each pair, with broadcasting."""
    return _ops.binary(x, y, "max")


def minimum(x: Any, y: Any) -> Any:
    """The smaller of each pair, with broadcasting."""
    return _ops.binary(x, y, "min")


def clamp(x: Any, min: float | None = None, max: float | None = None) -> Any:
    """``x`` held between ``min`` and ``max``."""
    for bound, kind in ((min, "max"), (max, "min")):
        if bound is not None:
            x = _ops.binary_scalar(x, bound, kind)
    return x


def mean(x: Any, dim: int = -1, keepdim: bool = False) -> Any:
    """Mean of the last axis."""
    return _reduce(x, "mean", dim, keepdim)


def sum(x: Any, dim: int = -1, keepdim: bool = False) -> Any:
    """Sum of the last axis."""
    return _reduce(x, "sum", dim, keepdim)


def amax(x: Any, dim: int = -1, keepdim: bool = False) -> Any:
    """Largest value of the last axis."""
    return _reduce(x, "max", dim, keepdim)


def softmax(x: Any, dim: int = -1) -> Any:
    """Softmax over the last axis."""
    _check_last("softmax", x, dim)
    return _ops.softmax(x)


def rope_interleaved(x_THD: Any, cos_sin_TR: Any) -> Any:
    """Rotary embedding of neighbouring pairs of the first R of D dimensions."""
    return _ops.rope_interleaved(x_THD, cos_sin_TR)


def _reduce(x: Any, kind: str, dim: int, keepdim: bool) -> Any:
    _check_last(kind, x, dim)
    return _ops.reduce(x, kind, keepdim)


def _check_last(what: str, x: Any, dim: int) -> None:
    if dim not in (-1, x.dim() - 1):
        raise ValueError(f"{what} works along the last axis (-1), not along {dim}")
