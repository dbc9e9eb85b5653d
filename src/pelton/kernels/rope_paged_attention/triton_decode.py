"""rope_paged_attention in Triton where every sequence has one token: one launch for a layer's attention.

Up to ``splits`` programs share the keys of a sequence and KV head, each at least ``least`` tiles of them, and
those that a short sequence has no use for leave at once. Each rotates the group's queries for itself. The
last one also rotates the new key, stores it and its value, and attends to them from registers, so that
nothing waits for a store. Whichever program finishes last joins the parts (flash decoding: Dao et al., 2023).
"""

import triton
import triton.language as tl

from pelton.kernels.kv_write.triton_codes import encode, encode_keys
from pelton.kernels.paged_attention.triton_attention import with_sink
from pelton.kernels.rope_kv_write.triton_rope_kv_write import rotated

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _scores(raw, scale, softcap, SOFTCAP: tl.constexpr):
    """Scores in units of log2(e), so that exp2 of them costs no multiplication of its own."""
    if SOFTCAP:
        # softcap * tanh(s / softcap), tanh(u) = 1 - 2 / (exp(2 u) + 1)
        return softcap * (1.0 - 2.0 / (tl.exp(2.0 * (raw * scale) / softcap) + 1.0)) * LOG2_E
    return raw * (scale * LOG2_E)


@triton.jit
def decode(
    q,
    k,
    v,
    cos_sin,
    k_cache,
    v_cache,
    slots,
    block_table,
    seq_lens,
    q_weight,
    k_weight,
    k_scale,
    v_scale,
    k_shift,
    k_queries,
    sinks,
    out,
    counters,
    partial,
    partial_max,
    partial_sum,
    eps,
    scale,
    softcap,
    y_scale,
    splits,
    least,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    COLUMNS: tl.constexpr,
    Q_ROW: tl.constexpr,
    K_ROW: tl.constexpr,
    V_ROW: tl.constexpr,
    Q_HEAD: tl.constexpr,
    K_HEAD: tl.constexpr,
    V_HEAD: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SHARED: tl.constexpr,
    JOIN: tl.constexpr,
    STAGES: tl.constexpr,
):
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    n_keys = tl.load(seq_lens + b)
    slot = tl.load(slots + b).to(tl.int64)
    # Keys in the cache, and the first that the token sees. A token without a slot is in the cache itself.
    cached = tl.where(slot >= 0, n_keys - 1, n_keys)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(n_keys - WINDOW, 0)
    first_tile = first // BLOCK_N
    n_tiles = tl.where(cached > first, tl.cdiv(cached, BLOCK_N) - first_tile, 0)
    programs = tl.maximum(tl.minimum(tl.cdiv(n_tiles, least), splits), 1)
    if split >= programs:
        return
    begin = (first_tile + split * n_tiles // programs) * BLOCK_N
    end = tl.minimum((first_tile + (split + 1) * n_tiles // programs) * BLOCK_N, cached)
    table = block_table + b * COLUMNS
    d = tl.arange(0, BLOCK_D)
    in_head = d < D
    row = tl.arange(0, ROWS)
    head = kv_head * GROUP + row
    valid = row < GROUP
    turn = cos_sin + b * (2 * HALF)
    element = q.dtype.element_ty
    # What products are of: codes of fp8 become float16 in half an instruction each, bfloat16 in several.
    narrow: tl.constexpr = element == tl.bfloat16 and k_cache.dtype.element_ty == tl.float8e4nv
    kind: tl.constexpr = tl.float16 if narrow else element
    queries = rotated(q + b * Q_ROW + head * Q_HEAD, valid, q_weight, turn, eps, D, HALF, BLOCK_D).to(element)
    if narrow:
        queries = tl.clamp(queries.to(tl.float32), -65504.0, 65504.0)
    queries = queries.to(kind)
    key_scale = None if k_scale is None else tl.load(k_scale + kv_head)
    value_scale = None if v_scale is None else tl.load(v_scale + kv_head)
    if k_scale is not None:
        scale *= key_scale
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    if split == programs - 1 and slot >= 0:
        one = kv_head + tl.arange(0, 1)
        place = ((slot // PAGE * KV_HEADS + one) * PAGE + slot % PAGE)[:, None] * D + d[None, :]
        key = rotated(k + b * K_ROW + one * K_HEAD, one >= 0, k_weight, turn, eps, D, HALF, BLOCK_D)
        key = encode_keys(
            key.to(element),
            key_scale,
            k_shift,
            k_queries,
            one[:, None],
            d[None, :],
            in_head[None, :],
            D,
            k_cache.dtype.element_ty,
        )
        value = v + b * V_ROW + (one * V_HEAD)[:, None] + d[None, :]
        value = tl.load(value, mask=in_head[None, :], other=0.0)
        value = encode(value, value_scale, v_cache.dtype.element_ty)
        tl.store(k_cache + place, key, mask=in_head[None, :])
        tl.store(v_cache + place, value, mask=in_head[None, :])
        raw = tl.sum(queries.to(tl.float32) * key.to(kind).to(tl.float32), 1)
        best = _scores(raw, scale, softcap, SOFTCAP)
        total = total + 1.0
        acc = acc + value.to(kind).to(tl.float32)

    column = tl.arange(0, BLOCK_N)
    for key0 in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        # Beyond the end the last key again, before the window its first: what is there may be anything, NaN
        # too, and blocks that are wholly outside the window are not there at all.
        key = tl.minimum(tl.maximum(key0 + column, first), end - 1)
        if PAGE % BLOCK_N == 0:
            # The tile lies in one block.
            block = tl.load(table + key0 // PAGE).to(tl.int64)
            at = (block * KV_HEADS + kv_head) * PAGE + key % PAGE
        else:
            block = tl.load(table + key // PAGE).to(tl.int64)
            at = (block * KV_HEADS + kv_head) * PAGE + key % PAGE
        places = at[:, None] * D + d[None, :]
        if D == BLOCK_D:
            keys = tl.load(k_cache + places)
            values = tl.load(v_cache + places)
        else:
            keys = tl.load(k_cache + places, mask=in_head[None, :], other=0.0)
            values = tl.load(v_cache + places, mask=in_head[None, :], other=0.0)
        s = tl.dot(queries, tl.trans(keys.to(kind)), input_precision="ieee")
        s = _scores(s, scale, softcap, SOFTCAP)
        seen = key0 + column < end
        if WINDOW > 0:
            seen = seen & (key0 + column >= first)
        s = tl.where(seen[None, :], s, float("-inf"))
        # Every tile has a key that is seen, so that this is a number.
        new_best = tl.maximum(best, tl.max(s, 1))
        p = tl.exp2(s - new_best[:, None])
        shrink = tl.exp2(best - new_best)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(kind), values.to(kind), acc * shrink[:, None], input_precision="ieee")
        best = new_best

    if v_scale is not None:
        acc *= value_scale
    to = out + (b * (KV_HEADS * GROUP) + head)[:, None] * D + d[None, :]
    # Of a group's rows beyond its heads, its last head's sink.
    own_sink = tl.minimum(head, kv_head * GROUP + GROUP - 1)
    if not SHARED:
        # A sequence without keys (padding) has no sum.
        total = with_sink(total, best, sinks, own_sink)
        y = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        y = encode(y.to(element), y_scale, out.dtype.element_ty)
        tl.store(to, y, mask=valid[:, None] & in_head[None, :])
    elif programs == 1:
        total = with_sink(total, best, sinks, own_sink)
        y = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        y = encode(y.to(element), y_scale, out.dtype.element_ty)
        tl.store(to, y, mask=valid[:, None] & in_head[None, :])
    else:
        group = b * KV_HEADS + kv_head
        part = (group * splits + split) * GROUP + row
        tl.store(partial_max + part, best, mask=valid)
        tl.store(partial_sum + part, total, mask=valid)
        tl.store(partial + part[:, None] * D + d[None, :], acc, mask=valid[:, None] & in_head[None, :])
        # All threads' parts are written before the count says so, and counted before they are read.
        tl.debug_barrier()
        if tl.atomic_add(counters + group, 1, sem="acq_rel") == programs - 1:
            tl.store(counters + group, 0)
            _join(
                out,
                partial,
                partial_max,
                partial_sum,
                group,
                splits,
                programs,
                y_scale,
                sinks,
                KV_HEADS,
                GROUP,
                GROUP_ROWS,
                D,
                BLOCK_D,
                JOIN,
            )


@triton.jit
def _join(
    out,
    partial,
    partial_max,
    partial_sum,
    group,
    splits,
    programs,
    y_scale,
    sinks,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    JOIN: tl.constexpr,
):
    """The parts of a group's heads, ``JOIN`` at a time, weighted by their share of the softmax."""
    row = tl.arange(0, GROUP_ROWS)
    d = tl.arange(0, BLOCK_D)
    best = tl.full([GROUP_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_ROWS], tl.float32)
    acc = tl.zeros([GROUP_ROWS, BLOCK_D], tl.float32)
    for start in tl.range(0, programs, JOIN):
        split = start + tl.arange(0, JOIN)
        there = (split < programs)[:, None] & (row < GROUP)[None, :]
        part = (group * splits + split)[:, None] * GROUP + row[None, :]
        # Not from L1, which knows nothing of other programs' stores.
        m = tl.load(partial_max + part, mask=there, other=float("-inf"), cache_modifier=".cg")
        n = tl.load(partial_sum + part, mask=there, other=0.0, cache_modifier=".cg")
        x = tl.load(
            partial + part[:, :, None] * D + d[None, None, :],
            mask=there[:, :, None] & (d < D)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_best = tl.maximum(best, tl.max(m, 0))
        # Rows that pad the group have -inf, and -inf - -inf is NaN.
        shift = tl.where(new_best == float("-inf"), 0.0, new_best)
        weight = tl.exp2(m - shift[None, :])
        shrink = tl.exp2(best - shift)
        total = total * shrink + tl.sum(weight * n, 0)
        acc = acc * shrink[:, None] + tl.sum(x * weight[:, :, None], 0)
        best = new_best
    total = with_sink(total, best, sinks, group % KV_HEADS * GROUP + tl.minimum(row, GROUP - 1))
    y = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(
        out + (group * GROUP + row)[:, None] * D + d[None, :],
        encode(y, y_scale, out.dtype.element_ty),
        mask=(row < GROUP)[:, None] & (d < D)[None, :],
    )
