"""paged_attention: causal attention of packed queries over the paged KV cache.

One op for prefill, chunked prefill and decode: sequence b owns query rows
``cu_seqlens[b]:cu_seqlens[b+1]`` and has ``seq_lens[b]`` keys, of which its queries are the last.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pelton.ir import float16_sums, kv_codes
from pelton.ir.op import Op, Sample, register
from pelton.ir.static_codes import LARGEST, left, result_dtype


def reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    y_scale: float | None = None,
    y_codes: str | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """``q``: (T, Hq, D); caches: (blocks, Hkv, block_size, D); ``block_table``: (B, M) int32;
    ``cu_seqlens``: (B+1,) int32; ``seq_lens``: (B,) int32 -> (T, Hq, D).

    A query at position p sees keys j <= p, and j > p - window when ``window`` > 0. Blocks wholly
    outside the window may be freed: their table entries are never read. ``softcap`` > 0 caps scores
    as ``softcap * tanh(s / softcap)`` before the mask. ``k_scale``, ``v_scale``: (Hkv,) float32, of
    caches of 8 bits (``kv_codes``); None: ones. With ``y_scale`` and ``y_codes`` the result is codes
    (``static_codes``). ``sinks``: (Hq,) float32, a logit of each head that joins its softmax after scale and
    cap, and attends to nothing (gpt-oss: OpenAI, 2025); None: none.
    """
    out = torch.zeros_like(q)
    group = q.shape[1] // k_cache.shape[1]
    for b in range(seq_lens.shape[0]):
        start, stop = int(cu_seqlens[b]), int(cu_seqlens[b + 1])
        n_keys, n_queries = int(seq_lens[b]), stop - start
        if n_queries == 0:
            continue
        first = max(0, n_keys - n_queries - window + 1) // k_cache.shape[2] if window else 0
        last = -(-n_keys // k_cache.shape[2])
        blocks = block_table[b, first:last].long()
        k = kv_codes.decode(k_cache[blocks].transpose(1, 2).flatten(0, 1), k_scale)
        v = kv_codes.decode(v_cache[blocks].transpose(1, 2).flatten(0, 1), v_scale)
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q[start:stop].float(), k) * scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        key_pos = torch.arange(k.shape[0]) + first * k_cache.shape[2]
        query_pos = torch.arange(n_keys - n_queries, n_keys)[:, None]
        visible = key_pos <= query_pos
        if window:
            visible &= key_pos > query_pos - window
        scores = scores.masked_fill(~visible, float("-inf"))
        # Slots past the sequence's end hold stale values (0 * NaN would spread), so drop them.
        v = v.masked_fill(~visible.any(0)[:, None, None], 0.0)
        if sinks is not None:
            sink = sinks.float()[:, None, None].expand(-1, n_queries, 1)
            scores = torch.cat([scores, sink], -1)
        p = scores.softmax(-1)[..., : k.shape[0]]
        out[start:stop] = torch.einsum("hqk,khd->qhd", p, v).to(q.dtype)
    return left(out, y_scale, y_codes)


def shape_rule(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
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
    block_size: int = 4,
    window: int = 0,
    softcap: float = 0.0,
    dtype: torch.dtype = torch.float32,
    y_codes: str | None = None,
    sinks: bool = False,
) -> Sample:
    """A batch of ``lens`` = (queries, keys) pairs over a shuffled block pool; free slots are NaN.

    Blocks wholly outside the window have been given back: their entries are 0, a block that is NaN.
    ``sinks``: the first is above all scores, the last below.
    """
    n_q, n_kv = heads
    need = [-(-keys // block_size) for _, keys in lens]
    pool = 1 + torch.randperm(sum(need) + 3, generator=g).int()
    caches = torch.full((2, len(pool) + 1, n_kv, block_size, dim), float("nan"))
    table = torch.zeros(len(lens), max(need) + 1, dtype=torch.int32)
    used = 0
    for b, (queries, keys) in enumerate(lens):
        table[b, : need[b]] = pool[used : used + need[b]]
        if window:
            table[b, : max(0, keys - queries - window + 1) // block_size] = 0
        for i, block in enumerate(pool[used : used + need[b]].tolist()):
            fill = min(block_size, keys - i * block_size)
            caches[:, block, :, :fill] = torch.randn(2, n_kv, fill, dim, generator=g)
        used += need[b]
    cu = torch.tensor([0, *torch.tensor([n for n, _ in lens]).cumsum(0).tolist()], dtype=torch.int32)
    q = torch.randn(int(cu[-1]), n_q, dim, generator=g)
    seq_lens = torch.tensor([keys for _, keys in lens], dtype=torch.int32)
    scales: tuple[torch.Tensor, ...] = ()
    if dtype in kv_codes.LARGEST:
        scales = (torch.rand(n_kv, generator=g) / 40 + 0.01, torch.rand(n_kv, generator=g) / 40 + 0.01)
        codes = (x.nan_to_num().transpose(1, 2).flatten(0, 1) for x in caches)
        k_cache, v_cache = (
            kv_codes.encode(x, dtype, s).view(-1, block_size, n_kv, dim).transpose(1, 2).contiguous()
            for x, s in zip(codes, scales, strict=True)
        )
    else:
        k_cache, v_cache = caches.to(dtype)
    sink = 3 * torch.randn(n_q, generator=g) if sinks else None
    if sink is not None:
        sink[0], sink[-1] = 500.0, -500.0
    y_scale = 1 / LARGEST[y_codes] if y_codes else None  # clips
    optional = [*(scales or (None, None)), y_scale, y_codes, sink]
    while optional and optional[-1] is None:
        optional.pop()
    how = f"{y_codes or ''}{' sinks' if sinks else ''}"
    return Sample(
        args=(q, k_cache, v_cache, table, cu, seq_lens, dim**-0.5, window, softcap, *optional),
        name=f"{lens} heads={heads} d={dim} window={window} cap={softcap} {dtype} {how}",
    )


def samples(g: torch.Generator) -> Iterator[Sample]:
    yield make_sample(g, lens=[(1, 1)])
    yield make_sample(g, lens=[(1, 9), (1, 4), (1, 23)], heads=(9, 3))
    yield make_sample(g, lens=[(5, 5), (3, 11), (1, 8)], heads=(4, 1))
    yield make_sample(g, lens=[(7, 7), (1, 30)], window=6)
    yield make_sample(g, lens=[(9, 20), (1, 17)], softcap=5.0, dim=80, block_size=16)
    yield make_sample(g, lens=[(130, 140), (1, 300)], heads=(8, 8), dim=128, block_size=16)
    yield make_sample(g, lens=[(4, 40), (1, 41)], dim=256, window=16, block_size=16)
    # Tiles of 128 rows and 128 keys of which some are whole, some cut by the diagonal, the end or the window.
    yield make_sample(g, lens=[(70, 200), (1, 300), (40, 40)], heads=(8, 2), dim=128, block_size=16)
    yield make_sample(g, lens=[(90, 400), (1, 17), (64, 192)], heads=(14, 2), window=150, block_size=8)
    for dtype in (torch.float16, torch.bfloat16):
        yield make_sample(g, lens=[(6, 12), (1, 50)], dtype=dtype, block_size=16)
    for dtype in (torch.int8, torch.float8_e4m3fn):
        yield make_sample(g, lens=[(6, 12), (1, 50), (1, 300)], dtype=dtype, block_size=16)
        yield make_sample(g, lens=[(130, 140), (1, 30)], dtype=dtype, heads=(6, 2), dim=84, window=40)
    for codes in LARGEST:
        yield make_sample(g, lens=[(20, 30), (1, 50)], dim=128, block_size=16, y_codes=codes)
        yield make_sample(g, lens=[(1, 30), (1, 9)], heads=(6, 2), block_size=16, y_codes=codes)
    yield make_sample(g, lens=[(1, 3), (1, 40)], heads=(6, 2), block_size=16, sinks=True)
    yield make_sample(g, lens=[(1, 150), (1, 400)], heads=(9, 3), block_size=16, softcap=5.0, sinks=True)
    yield make_sample(g, lens=[(70, 200), (1, 300), (9, 9)], heads=(8, 2), dim=128, block_size=16, sinks=True)
    yield make_sample(g, lens=[(30, 64), (1, 30)], window=6, softcap=5.0, block_size=16, sinks=True)
    for dtype in (torch.int8, torch.float8_e4m3fn):
        yield make_sample(g, lens=[(6, 12), (1, 50)], dtype=dtype, block_size=16, sinks=True)
    # Sizes of heads that models have besides those above.
    for dim in (96, 112, 160, 192):
        yield make_sample(g, lens=[(1, 20), (1, 3)], heads=(2, 1), dim=dim, block_size=16)


OP = register(
    Op(
        name="paged_attention",
        schema=(
            "paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, "
            "Tensor cu_seqlens, Tensor seq_lens, float scale, int window=0, float softcap=0.0, "
            "Tensor? k_scale=None, Tensor? v_scale=None, float? y_scale=None, str? y_codes=None, "
            "Tensor? sinks=None) -> Tensor"
        ),
        reference=reference,
        shape_rule=shape_rule,
        samples=samples,
        tolerance={
            "float32": 5e-6,
            "float16": 5e-6,
            "bfloat16": 1e-2,
            "int8": 3e-2,
            "fp8": 4e-2,
            "float16_sums": float16_sums.ATTENTION,
        },
    )
)
