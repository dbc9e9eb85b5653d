"""Next tokens from logits in Triton: one program a row, the rules of ``reference``, no sort.

top_k and top_p need the value of the last token that stays. It is found by halving an interval of the
logits' bit patterns, which are ordered as the logits are: 32 passes over the row, which lies in L2. Tokens
that have just this value stay in the order of their index, as many as the rules let.

Sums run in float32 here and in float64 on the host: near a boundary another token may be drawn.
"""

import triton
import triton.language as tl


@triton.jit
def _ordered(values):
    """int32 keys in the order of float32 ``values``."""
    bits = values.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _load(row, start, V: tl.constexpr, BLOCK: tl.constexpr):
    """A piece of a row, NaN as minus infinity, minus infinity past its end."""
    i = start + tl.arange(0, BLOCK)
    values = tl.load(row + i, mask=i < V, other=float("-inf"))
    return tl.where(values == values, values, float("-inf"))


@triton.jit
def _above(row, key, top, t, V: tl.constexpr, BLOCK: tl.constexpr):
    """How many tokens have keys of at least ``key``, and the sum of their weights."""
    count = tl.zeros([BLOCK], tl.int32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        values = _load(row, start, V, BLOCK)
        stays = _ordered(values) >= key
        count += stays.to(tl.int32)
        total += tl.where(stays, tl.exp((values - top) / t), 0.0)
    return tl.sum(count, 0), tl.sum(total, 0)


@triton.jit
def sample(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    uniform,
    tokens,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
):
    n = tl.program_id(0)
    row = logits + n.to(tl.int64) * V
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    where = tl.zeros([BLOCK], tl.int32)
    broken = tl.zeros([BLOCK], tl.int32)
    for start in range(0, V, BLOCK):
        i = start + tl.arange(0, BLOCK)
        raw = tl.load(row + i, mask=i < V, other=float("-inf"))
        broken |= ((raw != raw) | (raw == float("inf"))).to(tl.int32)
        larger = raw > best
        best = tl.where(larger, raw, best)
        where = tl.where(larger, i, where)
    top = tl.max(best, 0)
    greedy = tl.min(tl.where(best == top, where, V), 0)
    if (tl.max(broken, 0) > 0) | (top == float("-inf")):
        tl.store(tokens + n, -1)
        return
    t = tl.load(temperature + n)
    if t == 0.0:
        tl.store(tokens + n, greedy)
        return
    k = tl.load(top_k + n)
    p = tl.load(top_p + n)
    # Tokens whose key is above ``edge`` stay, and the first ``ties`` of those at it.
    edge = tl.full([], -2147483648, tl.int32)
    ties = tl.full([], V, tl.int32)
    count, kept = _above(row, edge, top, t, V, BLOCK)
    if (k > 0) & (k < V):
        low = tl.full([], -2147483648, tl.int64)
        high = tl.full([], 2147483648, tl.int64)
        for _step in range(32):  # the largest key that at least k tokens reach
            middle = (low + high) >> 1
            count, total = _above(row, middle.to(tl.int32), top, t, V, BLOCK)
            low = tl.where(count >= k, middle, low)
            high = tl.where(count >= k, high, middle)
        edge = low.to(tl.int32)
        more, above = _above(row, (low + 1).to(tl.int32), top, t, V, BLOCK)
        ties = k - more
        count, reached = _above(row, edge, top, t, V, BLOCK)
        kept = above + (reached - above) * ties / (count - more)
    if p < 1.0:
        wanted = p * kept
        low = edge.to(tl.int64)
        high = tl.full([], 2147483648, tl.int64)
        for _step in range(32):  # the largest key whose tokens and larger ones weigh enough
            middle = (low + high) >> 1
            count, total = _above(row, middle.to(tl.int32), top, t, V, BLOCK)
            enough = (total >= wanted) & (middle > low)
            low = tl.where(enough, middle, low)
            high = tl.where(enough | (middle == low), high, middle)
        key = low.to(tl.int32)
        more, above = _above(row, (low + 1).to(tl.int32), top, t, V, BLOCK)
        count, reached = _above(row, key, top, t, V, BLOCK)
        each = (reached - above) / tl.maximum(count - more, 1)
        needed = tl.ceil((wanted - above) / tl.maximum(each, 1e-38)).to(tl.int32)
        limit = tl.where(key == edge, ties, V)
        edge = key
        ties = tl.minimum(tl.maximum(needed, tl.where(more > 0, 0, 1)), limit)
    least = tl.load(min_p + n)
    total = tl.zeros([], tl.float32)
    seen = tl.zeros([], tl.int32)
    for start in range(0, V, BLOCK):
        values = _load(row, start, V, BLOCK)
        keys = _ordered(values)
        tied = (keys == edge).to(tl.int32)
        rank = seen + tl.cumsum(tied, 0)
        w = tl.exp((values - top) / t)
        stays = (keys > edge) | ((tied > 0) & (rank <= ties))
        total += tl.sum(tl.where(stays & (w >= least), w, 0.0), 0)
        seen += tl.sum(tied, 0)
    goal = tl.load(uniform + n) * total
    running = tl.zeros([], tl.float32)
    seen = tl.zeros([], tl.int32)
    chosen = greedy
    found = tl.zeros([], tl.int32)
    for start in range(0, V, BLOCK):
        if found == 0:
            values = _load(row, start, V, BLOCK)
            keys = _ordered(values)
            tied = (keys == edge).to(tl.int32)
            rank = seen + tl.cumsum(tied, 0)
            w = tl.exp((values - top) / t)
            stays = (keys > edge) | ((tied > 0) & (rank <= ties))
            w = tl.where(stays & (w >= least), w, 0.0)
            sums = running + tl.cumsum(w, 0)
            i = start + tl.arange(0, BLOCK)
            first = tl.min(tl.where((sums > goal) & (w > 0.0), i, V), 0)
            if first < V:
                chosen = first
                found = tl.full([], 1, tl.int32)
            running += tl.sum(w, 0)
            seen += tl.sum(tied, 0)
    tl.store(tokens + n, chosen)


@triton.jit
def resolve(ids, sampled, n, BLOCK: tl.constexpr):
    """Token ids below zero stand for tokens that the step before has sampled: -1 for row 0, -2 for row 1."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(ids + i, mask=i < n, other=0)
    waits = (token < 0) & (i < n)
    tl.store(ids + i, tl.load(sampled - token - 1, mask=waits, other=0), mask=waits)
