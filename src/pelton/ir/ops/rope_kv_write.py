"""rope_kv_write: rotate q and k, store k and v in the paged cache, return the rotated q.

``kv_write(rope(k), v)`` and ``rope(q)`` in one pass over the projection. With ``q_weight`` and
``k_weight`` each head is RMS-normalised first (Qwen3, Gemma 3).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pelton.ir.op import Op, Sample, register
from pelton.ir.ops import kv_write, rms_norm, rope


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    k_shift: torch.Tensor | None = None,
    k_queries: torch.Tensor | None = None,
) -> torch.Tensor:
    """``q``: (T, Hq, D); ``k``, ``v``: (T, Hkv, D); the rest as in rope, kv_write and rms_norm."""
    if q_weight is not None:
        q = rms_norm.reference(q, q_weight, eps)
    if k_weight is not None:
        k = rms_norm.reference(k, k_weight, eps)
    k = rope.reference(k, cos_sin)
    kv_write.reference(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale, k_shift, k_queries)
    return rope.reference(q, cos_sin)


def shape_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    k_shift: torch.Tensor | None = None,
    k_queries: torch.Tensor | None = None,
) -> torch.Tensor:
    return q.new_empty(q.shape)


def samples(g: torch.Generator) -> Iterator[Sample]:
    slots = torch.tensor([19, 0, -1, 7, 8, 13], dtype=torch.int32)
    for dtype, normed in ((torch.float32, False), (torch.float16, True), (torch.bfloat16, True)):
        qkv = torch.randn(6, (4 + 2 + 2) * 64, generator=g).view(6, 8, 64)
        angle = torch.randn(6, 32, generator=g)
        cos_sin = torch.cat([angle.cos(), angle.sin()], -1)
        caches = torch.randn(2, 5, 2, 4, 64, generator=g).to(dtype)
        weights = tuple(torch.randn(2, 64, generator=g)) if normed else (None, None)
        yield Sample(
            args=(qkv[:, :4], qkv[:, 4:6], qkv[:, 6:], cos_sin, *caches, slots, *weights, 1e-6),
            name=f"{dtype} normed={normed}",
        )
    for dtype in (torch.int8, torch.float8_e4m3fn):
        qkv = torch.randn(6, (4 + 2 + 2) * 64, generator=g).view(6, 8, 64)
        angle = torch.randn(6, 32, generator=g)
        cos_sin = torch.cat([angle.cos(), angle.sin()], -1)
        caches = torch.zeros(2, 5, 2, 4, 64, dtype=dtype)
        scales = (torch.tensor([0.04, 0.01]), torch.tensor([0.02, 0.05]))
        args = (qkv[:, :4], qkv[:, 4:6], qkv[:, 6:], cos_sin, *caches, slots, None, None, 0.0, *scales)
        yield Sample(args=args, name=f"{dtype} scaled")
        shift = torch.randn(2, 64, generator=g)
        yield Sample(args=(*args, shift), name=f"{dtype} shifted")
        queries = torch.randn(2, 128, generator=g).abs()
        yield Sample(args=(*args, shift, queries), name=f"{dtype} shifted, looked at again")


OP = register(
    Op(
        name="rope_kv_write",
        schema=(
            "rope_kv_write(Tensor q, Tensor k, Tensor v, Tensor cos_sin, Tensor(a!) k_cache, "
            "Tensor(b!) v_cache, Tensor slot_mapping, Tensor? q_weight=None, "
            "Tensor? k_weight=None, float eps=0.0, Tensor? k_scale=None, Tensor? v_scale=None, "
            "Tensor? k_shift=None, Tensor? k_queries=None) -> Tensor"
        ),
        reference=reference,
        shape_rule=shape_rule,
        samples=samples,
        tolerance={"float32": 2e-6, "float16": 1e-3, "bfloat16": 1e-2},
        mutates=(4, 5),
    )
)
