"""Paged attention in Triton, for prefill, decode and any mixture of both (flash attention: Dao et al., 2022).

A program handles one KV head and a tile of queries of one sequence: ``BLOCK_Q`` tokens times the query
heads that share the KV head are the rows of its scores. Tiles are numbered over all sequences without a
table: sequence b starts at tile ``cu_seqlens[b] // BLOCK_Q + b``, which leaves at most one tile unused each.
With ``SPLITS`` > 1 the keys of a tile are shared out, and ``combine`` joins the parts.

With ``HALF_SUMS`` tensor cores add in float16: scores, of queries that have been scaled, and weights times
values over a tile's keys. All between and behind is float32: the softmax with its maximum and sum, and the
results, which tiles are added to.
"""

import triton
import triton.language as tl

from pelton.kernels.gpu.triton_sums import dot
from pelton.kernels.kv_write.triton_codes import encode

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _sequence_of_tile(tile, cu_seqlens, sequences, BLOCK_Q: tl.constexpr):
    """The last sequence that starts at or before ``tile``."""
    low = 0
    high = sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu_seqlens + middle) // BLOCK_Q + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _places(
    key0,
    column,
    exists,
    table,
    kv_head,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Where the keys ``key0 + column`` lie in the cache, in elements."""
    if PAGE % BLOCK_N == 0:
        # The tile lies in one block: its address is a number, and its keys are contiguous.
        block = tl.load(table + key0 // PAGE).to(tl.int64)
        return ((block * KV_HEADS + kv_head) * PAGE + key0 % PAGE + column) * D
    key = key0 + column
    block = tl.load(table + key // PAGE, mask=exists, other=0).to(tl.int64)
    return ((block * KV_HEADS + kv_head) * PAGE + key % PAGE) * D


@triton.jit
def _accumulate(
    q_tile,
    k_cache,
    v_cache,
    at,
    in_head,
    exists,
    seen,
    best,
    total,
    acc,
    factor,
    softcap,
    SOFTCAP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HALF_SUMS: tl.constexpr,
):
    """One tile of keys more. ``exists``, ``seen``: masks of keys and of scores, or True for all."""
    d = tl.arange(0, BLOCK_D)
    places = at[:, None] + d[None, :]
    if exists is True and D == BLOCK_D:
        k = tl.load(k_cache + places)
        v = tl.load(v_cache + places)
    else:
        mask = in_head[None, :] if exists is True else exists[:, None] & in_head[None, :]
        k = tl.load(k_cache + places, mask=mask, other=0.0)
        v = tl.load(v_cache + places, mask=mask, other=0.0)
    k = tl.trans(k.to(q_tile.dtype))
    if HALF_SUMS:
        s = tl.dot(q_tile, k, out_dtype=tl.float16).to(tl.float32) * factor
    else:
        s = tl.dot(q_tile, k, input_precision="ieee") * factor
    if SOFTCAP:
        # softcap * tanh(s / softcap), tanh(u) = 1 - 2 / (exp(2 u) + 1)
        s = softcap * (1.0 - 2.0 / (tl.exp(2.0 * s / softcap) + 1.0)) * LOG2_E
    if seen is not True:
        s = tl.where(seen, s, float("-inf"))
    new_best = tl.maximum(best, tl.max(s, 1))
    # A row that has seen no key yet has -inf, and -inf - -inf is NaN.
    shift = new_best if seen is True else tl.where(new_best == float("-inf"), 0.0, new_best)
    p = tl.exp2(s - shift[:, None])
    alpha = tl.exp2(best - shift)
    total = total * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None]
    acc = dot(p.to(q_tile.dtype), v.to(q_tile.dtype), acc, HALF_SUMS)
    return new_best, total, acc


@triton.jit
def with_sink(total, best, sinks, head):
    """The sums of softmaxes, of which ``total`` are without the sinks of heads ``head``, in units of 2 to the
    power of ``best``. Infinite where a sink is far above that: what is divided by it is 0."""
    if sinks is not None:
        total += tl.exp2(tl.load(sinks + head).to(tl.float32) * LOG2_E - best)
    return total


@triton.jit
def attention(
    q,
    k_cache,
    v_cache,
    block_table,
    cu_seqlens,
    seq_lens,
    k_scale,
    v_scale,
    out,
    sinks,
    partial,
    partial_max,
    partial_sum,
    sequences,
    scale,
    softcap,
    y_scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    COLUMNS: tl.constexpr,
    Q_ROW: tl.constexpr,
    Q_HEAD: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
    UNMASKED: tl.constexpr,
    STAGES: tl.constexpr,
    HALF_SUMS: tl.constexpr,
):
    # The last tiles of a long prompt see the most keys: they begin first, so that none is left alone.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    b = _sequence_of_tile(tile, cu_seqlens, sequences, BLOCK_Q)
    start = tl.load(cu_seqlens + b)
    n_queries = tl.load(cu_seqlens + b + 1) - start
    first_query = (tile - (start // BLOCK_Q + b)) * BLOCK_Q
    if first_query >= n_queries:
        return
    n_keys = tl.load(seq_lens + b)
    context = n_keys - n_queries
    row = tl.arange(0, BLOCK_M)
    query = first_query + row // GROUP
    head = kv_head * GROUP + row % GROUP
    valid = (query < n_queries) & (row < BLOCK_Q * GROUP)
    position = context + query
    d = tl.arange(0, BLOCK_D)
    in_head = d < D
    token = (start + query).to(tl.int64)
    q_tile = tl.load(
        q + token[:, None] * Q_ROW + head[:, None] * Q_HEAD + d[None, :],
        mask=valid[:, None] & in_head[None, :],
        other=0.0,
    )
    # Keys that some query of the tile sees, then this program's share of them, in whole key tiles.
    last_key = tl.minimum(context + first_query + BLOCK_Q, n_keys)
    first_tile = 0
    if WINDOW > 0:
        first_tile = tl.maximum(context + first_query - WINDOW + 1, 0) // BLOCK_N
    n_tiles = tl.cdiv(last_key, BLOCK_N) - first_tile
    share = tl.cdiv(n_tiles, SPLITS)
    first_tile += split * share
    end = tl.minimum((first_tile + share) * BLOCK_N, last_key)
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    begin = first_tile * BLOCK_N
    # Tiles before ``masked`` are seen whole by every query; with a window none is known to be. The two
    # loops may round differently, so that without ``UNMASKED`` a query's result does not depend on its tile.
    masked = begin
    if UNMASKED and WINDOW == 0:
        whole = (tl.minimum(context + first_query + 1, last_key) // BLOCK_N) * BLOCK_N
        masked = tl.maximum(begin, tl.minimum(whole, end))
    column = tl.arange(0, BLOCK_N)
    table = block_table + b.to(tl.int64) * COLUMNS
    # exp2 of scores in units of log2(e), which costs no multiplication of its own.
    factor = scale if SOFTCAP else scale * LOG2_E
    if k_scale is not None:
        factor *= tl.load(k_scale + kv_head)
    if HALF_SUMS:
        # By the factor's power of two, which rounds nothing, so that sums are at most the scores.
        power = (factor.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        power = tl.minimum(tl.maximum(power, 0.00006103515625), 1.0)  # 2^-14: a normal number of float16
        q_tile = (q_tile * power).to(q_tile.dtype)
        factor /= power
    for key0 in tl.range(begin, masked, BLOCK_N, num_stages=STAGES):
        at = _places(key0, column, True, table, kv_head, HEADS // GROUP, D, PAGE, BLOCK_N)
        best, total, acc = _accumulate(
            q_tile,
            k_cache,
            v_cache,
            at,
            in_head,
            True,
            True,
            best,
            total,
            acc,
            factor,
            softcap,
            SOFTCAP,
            D,
            BLOCK_D,
            HALF_SUMS,
        )
    for key0 in tl.range(masked, end, BLOCK_N, num_stages=STAGES):
        key = key0 + column
        exists = key < last_key
        if WINDOW > 0:
            # Blocks that no query of the tile sees may be given back: their entries are of other blocks.
            exists = exists & (key > context + first_query - WINDOW)
        at = _places(key0, column, exists, table, kv_head, HEADS // GROUP, D, PAGE, BLOCK_N)
        seen = exists[None, :] & (key[None, :] <= position[:, None])
        if WINDOW > 0:
            seen = seen & (key[None, :] > position[:, None] - WINDOW)
        best, total, acc = _accumulate(
            q_tile,
            k_cache,
            v_cache,
            at,
            in_head,
            exists,
            seen,
            best,
            total,
            acc,
            factor,
            softcap,
            SOFTCAP,
            D,
            BLOCK_D,
            HALF_SUMS,
        )
    if v_scale is not None:
        acc *= tl.load(v_scale + kv_head)
    if SPLITS == 1:
        total = with_sink(total, best, sinks, head)
        y = acc / total[:, None]
        tl.store(
            out + (token[:, None] * HEADS + head[:, None]) * D + d[None, :],
            encode(y.to(q.dtype.element_ty), y_scale, out.dtype.element_ty),
            mask=valid[:, None] & in_head[None, :],
        )
    else:
        part = (token * HEADS + head) * SPLITS + split
        tl.store(partial_max + part, best, mask=valid)
        tl.store(partial_sum + part, total, mask=valid)
        tl.store(partial + part[:, None] * D + d[None, :], acc, mask=valid[:, None] & in_head[None, :])


@triton.jit
def combine(
    out,
    partial,
    partial_max,
    partial_sum,
    sinks,
    y_scale,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """One program a token and head: the parts of its keys, weighted by their share of the softmax."""
    head = tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)
    split = tl.arange(0, SPLITS)
    d = tl.arange(0, BLOCK_D)
    in_head = d < D
    m = tl.load(partial_max + head * SPLITS + split)
    weight = tl.exp2(m - tl.max(m, 0))
    total = tl.sum(weight * tl.load(partial_sum + head * SPLITS + split), 0)
    total = with_sink(total, tl.max(m, 0), sinks, tl.program_id(1))
    parts = tl.load(
        partial + (head * SPLITS + split)[:, None] * D + d[None, :], mask=in_head[None, :], other=0.0
    )
    y = tl.sum(parts * weight[:, None], 0) / total
    tl.store(out + head * D + d, encode(y, y_scale, out.dtype.element_ty), mask=in_head)
