"""rope_paged_attention: rope_kv_write, then paged_attention of the rotated q. An ordered effect.

One op, so that a decode step can rotate, store and attend in one kernel: what the step writes is used from
registers, and the rotated q is never in memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pelton.ir import float16_sums, kv_codes
from pelton.ir.op import Op, Sample, register
from pelton.ir.ops import paged_attention, rope_kv_write
from pelton.ir.static_codes import LARGEST, result_dtype


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_lens: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    k_shift: torch.Tensor | None = None,
    k_queries: torch.Tensor | None = None,
    y_scale: float | None = None,
    y_codes: str | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """``q``: (T, Hq, D); ``k``, ``v``: (T, Hkv, D); the rest as in rope_kv_write and paged_attention
    -> (T, Hq, D).

    A token's slot is that of its position in ``block_table``, or -1 where its K and V are in the cache
    already or its sequence has no keys.
    """
    of_codes = k_scale, v_scale, k_shift, k_queries
    rotated = rope_kv_write.reference(
        q, k, v, cos_sin, k_cache, v_cache, slot_mapping, q_weight, k_weight, eps, *of_codes
    )
    return paged_attention.reference(
        rotated,
        k_cache,
        v_cache,
        block_table,
        cu_seqlens,
        seq_lens,
        scale,
        window,
        softcap,
        k_scale,
        v_scale,
        y_scale=y_scale,
        y_codes=y_codes,
        sinks=sinks,
    )


def shape_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_lens: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    k_shift: torch.Tensor | None = None,
    k_queries: torch.Tensor | None = None,
    y_scale: float | None = None,
    y_codes: str | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    return q.new_empty(q.shape, dtype=result_dtype(q, y_codes))


def make_sample(
    g: torch.Generator,
    *,
    lens: list[tuple[int, int]],
    heads: tuple[int, int] = (4, 2),
    dim: int = 64,
    rotary: int = 0,
    block_size: int = 4,
    window: int = 0,
    softcap: float = 0.0,
    normed: bool = False,
    dtype: torch.dtype = torch.float32,
    cached: int = -1,
    shifted: bool = False,
    y_codes: str | None = None,
    sinks: bool = False,
) -> Sample:
    """A batch of ``lens`` = (queries, keys) pairs; what the step writes is NaN, or 99, in the cache before.

    ``rotary``: dimensions that rotate, 0: all; ``cached``: a token whose slot is -1, its K and V being there.
    """
    cache = {"lens": lens, "heads": heads, "dim": dim, "block_size": block_size, "dtype": dtype}
    attention = paged_attention.make_sample(g, **cache, window=window, softcap=softcap, sinks=sinks)
    _, k_cache, v_cache, table, cu_seqlens, seq_lens, scale, _, _, *optional = attention.args
    scales, sink = optional[:2], optional[4] if sinks else None
    slots: list[int] = []
    for b, (queries, keys) in enumerate(lens):
        for position in range(keys - queries, keys):
            block, offset = int(table[b, position // block_size]), position % block_size
            if len(slots) == cached:
                slots.append(-1)
                continue
            slots.append(block * block_size + offset)
            stale = 99.0 if dtype in kv_codes.LARGEST else float("nan")
            k_cache[block, :, offset] = v_cache[block, :, offset] = stale
    n_q, n_kv = heads
    tokens, rotary = len(slots), rotary or dim
    qkv = torch.randn(tokens, n_q + 2 * n_kv, dim, generator=g)
    angle = torch.randn(tokens, rotary // 2, generator=g)
    cos_sin = torch.cat([angle.cos(), angle.sin()], -1)
    weights = tuple(torch.randn(2, dim, generator=g)) if normed else (None, None)
    qkv_views = qkv[:, :n_q], qkv[:, n_q : n_q + n_kv], qkv[:, n_q + n_kv :]
    step = torch.tensor(slots, dtype=torch.int32), table, cu_seqlens, seq_lens
    numbers = 1e-6, scale, window, softcap
    if shifted:
        scales += [torch.randn(n_kv, dim, generator=g), torch.randn(n_kv, 2 * dim, generator=g).abs()]
    codes = [1 / LARGEST[y_codes] if y_codes else None, y_codes]
    optional = [*scales, *[None] * (4 - len(scales)), *codes, sink]
    while optional and optional[-1] is None:
        optional.pop()
    name = (
        f"{attention.name} rotary={rotary} normed={normed} cached={cached} shifted={shifted} {y_codes or ''}"
    )
    return Sample(
        args=(*qkv_views, cos_sin, k_cache, v_cache, *step, *weights, *numbers, *optional),
        name=name,
    )


def samples(g: torch.Generator) -> Iterator[Sample]:
    yield make_sample(g, lens=[(1, 9), (1, 4), (1, 1), (1, 23)], heads=(9, 3), cached=1)
    yield make_sample(g, lens=[(1, 130), (1, 65), (1, 64), (1, 400)], block_size=16, normed=True)
    yield make_sample(g, lens=[(1, 200), (1, 3)], heads=(20, 1), rotary=32, block_size=16)
    yield make_sample(g, lens=[(1, 150), (1, 33)], block_size=8, window=40, softcap=5.0)
    yield make_sample(g, lens=[(1, 99), (1, 7)], dim=80, rotary=20, block_size=16, window=1)
    yield make_sample(g, lens=[(1, 97)], dim=256, block_size=32, normed=True)
    yield make_sample(g, lens=[(5, 5), (3, 11), (1, 8)], heads=(4, 1), normed=True)
    yield make_sample(g, lens=[(7, 20), (1, 30)], window=6, softcap=5.0, block_size=16)
    for dtype in (torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn):
        yield make_sample(g, lens=[(1, 70), (1, 50)], dtype=dtype, heads=(8, 2), dim=128, block_size=16)
    for dtype in (torch.float8_e4m3fn, torch.int8):
        yield make_sample(g, lens=[(1, 70), (1, 50)], dtype=dtype, dim=80, rotary=32, shifted=True)
        yield make_sample(g, lens=[(5, 5), (1, 8)], dtype=dtype, block_size=16, normed=True, shifted=True)
        yield make_sample(g, lens=[(1, 70), (1, 9)], dtype=dtype, dim=128, block_size=16, shifted=True)
    for codes in LARGEST:
        yield make_sample(g, lens=[(1, 130), (1, 9)], dim=128, block_size=16, y_codes=codes)
        yield make_sample(g, lens=[(20, 30), (1, 9)], heads=(8, 2), block_size=16, y_codes=codes)
    yield make_sample(g, lens=[(1, 9), (1, 1), (1, 40)], heads=(6, 2), block_size=16, sinks=True)
    yield make_sample(g, lens=[(1, 130), (1, 400)], heads=(16, 1), dim=128, block_size=16, sinks=True)
    yield make_sample(g, lens=[(1, 150)], heads=(9, 3), block_size=16, window=40, softcap=5.0, sinks=True)
    yield make_sample(g, lens=[(5, 5), (3, 41), (1, 8)], dim=128, block_size=16, sinks=True)
    for dtype in (torch.int8, torch.float8_e4m3fn):
        yield make_sample(g, lens=[(1, 70), (1, 50)], dtype=dtype, block_size=16, sinks=True)
    # Sizes of heads that models have besides those above.
    for dim in (96, 112, 160, 192):
        yield make_sample(g, lens=[(1, 20), (1, 3)], heads=(2, 1), dim=dim, block_size=16)


OP = register(
    Op(
        name="rope_paged_attention",
        schema=(
            "rope_paged_attention(Tensor q, Tensor k, Tensor v, Tensor cos_sin, Tensor(a!) k_cache, "
            "Tensor(b!) v_cache, Tensor slot_mapping, Tensor block_table, Tensor cu_seqlens, "
            "Tensor seq_lens, Tensor? q_weight, Tensor? k_weight, float eps, float scale, int window=0, "
            "float softcap=0.0, Tensor? k_scale=None, Tensor? v_scale=None, "
            "Tensor? k_shift=None, Tensor? k_queries=None, float? y_scale=None, str? y_codes=None, "
            "Tensor? sinks=None) -> Tensor"
        ),
        reference=reference,
        shape_rule=shape_rule,
        samples=samples,
        tolerance={
            "float32": 5e-6,
            "float16": 2e-3,
            "bfloat16": 1e-2,
            "int8": 3e-2,
            "fp8": 4e-2,
            "float16_sums": float16_sums.ROTATED,
        },
        mutates=(4, 5),
        optional=True,
    )
)
