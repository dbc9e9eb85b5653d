"""Self-attention over the paged KV cache: GQA/MQA, biases, q/k norm, window, soft-cap, sinks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from pelton.nn import functional as F
from pelton.nn.layers import Linear, RMSNorm
from pelton.nn.module import Module


class AttentionInputs(NamedTuple):
    """One KV group's view of the step: int32 tensors, as ``engine.batch.AttentionMetadata``."""

    slot_mapping_T: Any
    block_table_BM: Any
    cu_seqlens: Any
    seq_lens_B: Any


class Attention(Module):
    """Causal self-attention with ``num_heads`` query heads over ``num_kv_heads`` key/value heads.

    ``head_dim`` is independent of ``hidden_size``. ``scale`` multiplies q.k (default
    ``head_dim ** -0.5``); ``window`` > 0 lets a query see itself and ``window - 1`` tokens before;
    ``softcap`` > 0 caps scores. ``q_norm`` and ``k_norm`` normalise each head before the rotation. ``sinks``:
    each query head has a learned logit, the parameter ``sinks`` (num_heads), that joins its softmax and
    attends to nothing (gpt-oss: OpenAI, 2025).
    ``packed``: the checkpoint (Phi-3, GPT-2), or the pass ``fuse_qkv``, stacks q, k and v in one
    projection ``qkv_proj``.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        qkv_bias: bool = False,
        out_bias: bool = False,
        scale: float | None = None,
        window: int = 0,
        softcap: float = 0.0,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
        sinks: bool = False,
        packed: bool = False,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = head_dim**-0.5 if scale is None else scale
        self.window = window
        self.softcap = softcap
        self.packed = packed
        q_size, kv_size = num_heads * head_dim, num_kv_heads * head_dim
        if packed:
            self.qkv_proj = Linear(hidden_size, q_size + 2 * kv_size, bias=qkv_bias)
        else:
            self.q_proj = Linear(hidden_size, q_size, bias=qkv_bias)
            self.k_proj = Linear(hidden_size, kv_size, bias=qkv_bias)
            self.v_proj = Linear(hidden_size, kv_size, bias=qkv_bias)
        self.o_proj = Linear(q_size, hidden_size, bias=out_bias)
        if q_norm is not None:
            self.q_norm = q_norm
        if k_norm is not None:
            self.k_norm = k_norm
        self.has_sinks = sinks
        if sinks:
            self.sinks = torch.nn.Parameter(torch.empty(num_heads))
        self.has_qk_norm = q_norm is not None and k_norm is not None
        self.key_factors: Any | None = None
        """(num_kv_heads, head_dim) that the pass ``smooth_keys`` has divided the keys by; None: nothing."""

    def forward(
        self, x_TD: Any, cos_sin_TR: Any | None, k_cache: Any, v_cache: Any, inputs: AttentionInputs
    ) -> Any:
        """``cos_sin_TR``: the step's rotations, or None for models with learned positions."""
        q, k, v = self.project(x_TD)
        if self.has_qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if cos_sin_TR is not None:
            q, k = F.rope(q, cos_sin_TR), F.rope(k, cos_sin_TR)
        F.kv_write(k, v, k_cache, v_cache, inputs.slot_mapping_T)
        out_THD = F.paged_attention(
            q,
            k_cache,
            v_cache,
            inputs.block_table_BM,
            inputs.cu_seqlens,
            inputs.seq_lens_B,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            sinks_H=self.sinks if self.has_sinks else None,
        )
        return self.o_proj(out_THD.view(-1, self.num_heads * self.head_dim))

    def project(self, x_TD: Any) -> tuple[Any, Any, Any]:
        """q (T, num_heads, head_dim), k and v (T, num_kv_heads, head_dim)."""
        if self.packed:
            q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
            q, k, v = self.qkv_proj(x_TD).split([q_size, kv_size, kv_size], dim=-1)
        else:
            q, k, v = self.q_proj(x_TD), self.k_proj(x_TD), self.v_proj(x_TD)
        return (
            q.view(-1, self.num_heads, self.head_dim),
            k.view(-1, self.num_kv_heads, self.head_dim),
            v.view(-1, self.num_kv_heads, self.head_dim),
        )
