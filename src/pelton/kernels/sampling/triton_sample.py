"""Next tokens from logits in Triton, by the rules of ``reference`` and without a sort.

Three kernels. ``scan``: the largest logit of each piece of a row. ``weigh``: for rows that draw, the sum of
each piece's weights, and for those with top_k or top_p its *candidates*: tokens within some temperatures of
the largest, as far as there is room, in the order of their index. ``choose``: the token of a row. top_k and
top_p need the value of the last token that stays: it is found by halving an interval of the logits' bit
patterns, which are ordered as the logits are; over the candidates, a few hundred as a rule, or where these
weigh too little over the row. Tokens that have just this value stay in the order of their index, as many as
the rules let.

Sums run in float32 here and in float64 on the host: near a boundary another token may be drawn.
"""

import triton
import triton.language as tl

#: Candidates lie within this many temperatures of the largest logit, or where they are too many, of
#: ``NARROWER`` less, and so on.
REACH = tl.constexpr(12.0)
NARROWER = tl.constexpr(2.0)
REACHES = tl.constexpr(5)


@triton.jit
def _ordered(values):
    """int32 keys in the order of float32 ``values``."""
    bits = values.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _load(row, start, n, BLOCK: tl.constexpr):
    """A piece of a row, NaN as minus infinity, minus infinity past its end."""
    i = start + tl.arange(0, BLOCK)
    values = tl.load(row + i, mask=i < n, other=float("-inf"))
    return tl.where(values == values, values, float("-inf"))


@triton.jit
def _largest(part_max, n, PIECES: tl.constexpr, PIECES_2: tl.constexpr):
    """A row's largest logit; NaN where one is NaN or infinite."""
    p = tl.arange(0, PIECES_2)
    tops = tl.load(part_max + n * PIECES + p, mask=p < PIECES, other=float("-inf"))
    broken = tl.max((tops != tops).to(tl.int32), 0) > 0
    top = tl.max(tl.where(tops == tops, tops, float("-inf")), 0)
    return tl.where(broken, float("nan"), top)


@triton.jit
def scan(logits, part_max, part_at, V: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr):
    """Of a piece of a row: the largest logit (NaN: one is NaN or infinite), and the first index with it."""
    n = tl.program_id(0)
    piece = tl.program_id(1)
    i = piece * PIECE + tl.arange(0, PIECE)
    values = tl.load(logits + n.to(tl.int64) * V + i, mask=i < V, other=float("-inf"))
    broken = tl.max(((values != values) | (values == float("inf"))).to(tl.int32), 0) > 0
    top = tl.max(tl.where(values == values, values, float("-inf")), 0)
    at = tl.min(tl.where(values == top, i, V), 0)
    tl.store(part_max + n * PIECES + piece, tl.where(broken, float("nan"), top))
    tl.store(part_at + n * PIECES + piece, at)


@triton.jit
def weigh(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    part_max,
    part_sum,
    part_count,
    part_reach,
    candidate,
    candidate_at,
    V: tl.constexpr,
    PIECES: tl.constexpr,
    PIECES_2: tl.constexpr,
    PIECE: tl.constexpr,
    ROOM: tl.constexpr,
):
    n = tl.program_id(0)
    piece = tl.program_id(1)
    t = tl.load(temperature + n)
    top = _largest(part_max, n, PIECES, PIECES_2)
    if (t == 0.0) | (top != top) | (top == float("-inf")):
        return
    k = tl.load(top_k + n)
    cuts = ((k > 0) & (k < V)) | (tl.load(top_p + n) < 1.0)
    values = _load(logits + n.to(tl.int64) * V, piece * PIECE, V, PIECE)
    w = tl.exp((values - top) / t)
    part = n * PIECES + piece
    if cuts:
        tl.store(part_sum + part, tl.sum(w, 0))
        reach = tl.full([], 0.0, tl.float32)  # not even the narrowest has room
        for r in tl.static_range(REACHES):
            wide = REACH - NARROWER * r
            count = tl.sum((values >= top - wide * t).to(tl.int32), 0)
            reach = tl.where((reach == 0.0) & (count <= ROOM), wide, reach)
        near = (values >= tl.where(reach > 0.0, top - reach * t, float("inf"))).to(tl.int32)
        here = part.to(tl.int64) * ROOM + tl.cumsum(near, 0) - 1
        tl.store(candidate + here, values, mask=near > 0)
        tl.store(candidate_at + here, piece * PIECE + tl.arange(0, PIECE), mask=near > 0)
        tl.store(part_count + part, tl.sum(near, 0))
        tl.store(part_reach + part, reach)
    else:
        tl.store(part_sum + part, tl.sum(tl.where(w >= tl.load(min_p + n), w, 0.0), 0))


@triton.jit
def _above(row, n, key, top, t, BLOCK: tl.constexpr):
    """How many of ``n`` logits have keys of at least ``key``, and the sum of their weights."""
    count = tl.zeros([BLOCK], tl.int32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        values = _load(row, start, n, BLOCK)
        stays = (_ordered(values) >= key) & (start + tl.arange(0, BLOCK) < n)
        count += stays.to(tl.int32)
        total += tl.where(stays, tl.exp((values - top) / t), 0.0)
    return tl.sum(count, 0), tl.sum(total, 0)


@triton.jit
def _limits(row, n, least, top, t, k, p, everything, V: tl.constexpr, BLOCK: tl.constexpr):
    """Tokens of the row whose key is above the first result stay, and of those at it as many as the second.

    ``least``: a key that none of the row's is below; ``everything``: the sum of all weights.
    """
    edge = least.to(tl.int64)
    ties = tl.full([], V, tl.int32)
    kept = everything
    end = _ordered(top).to(tl.int64) + 1
    if (k > 0) & (k < V):
        low, high = edge, end
        while high - low > 1:  # the largest key that at least k tokens reach
            middle = (low + high) >> 1
            count, total = _above(row, n, middle.to(tl.int32), top, t, BLOCK)
            low = tl.where(count >= k, middle, low)
            high = tl.where(count >= k, high, middle)
        edge = low
        more, above = _above(row, n, (edge + 1).to(tl.int32), top, t, BLOCK)
        count, reached = _above(row, n, edge.to(tl.int32), top, t, BLOCK)
        ties = k - more
        kept = above + (reached - above) * ties / (count - more)
    if p < 1.0:
        wanted = p * kept
        low, high = edge, end
        while high - low > 1:  # the largest key whose tokens and larger ones weigh enough
            middle = (low + high) >> 1
            count, total = _above(row, n, middle.to(tl.int32), top, t, BLOCK)
            low = tl.where(total >= wanted, middle, low)
            high = tl.where(total >= wanted, high, middle)
        more, above = _above(row, n, (low + 1).to(tl.int32), top, t, BLOCK)
        count, reached = _above(row, n, low.to(tl.int32), top, t, BLOCK)
        each = (reached - above) / tl.maximum(count - more, 1)
        needed = tl.ceil((wanted - above) / tl.maximum(each, 1e-38)).to(tl.int32)
        limit = tl.where(low == edge, ties, V)
        edge = low
        ties = tl.minimum(tl.maximum(needed, tl.where(more > 0, 0, 1)), limit)
    return edge.to(tl.int32), ties


@triton.jit
def _draw(row, n, edge, ties, least, top, t, uniform, V: tl.constexpr, BLOCK: tl.constexpr):
    """Index in the row at which the running sum of what stays exceeds ``uniform`` of its sum; -1: none."""
    total = tl.zeros([], tl.float32)
    seen = tl.zeros([], tl.int32)
    for start in range(0, n, BLOCK):
        values = _load(row, start, n, BLOCK)
        keys = _ordered(values)
        tied = ((keys == edge) & (start + tl.arange(0, BLOCK) < n)).to(tl.int32)
        w = tl.exp((values - top) / t)
        stays = (keys > edge) | ((tied > 0) & (seen + tl.cumsum(tied, 0) <= ties))
        total += tl.sum(tl.where(stays & (w >= least), w, 0.0), 0)
        seen += tl.sum(tied, 0)
    goal = uniform * total
    running = tl.zeros([], tl.float32)
    seen = tl.zeros([], tl.int32)
    chosen = tl.full([], -1, tl.int32)
    for start in range(0, n, BLOCK):
        if chosen < 0:
            values = _load(row, start, n, BLOCK)
            keys = _ordered(values)
            i = start + tl.arange(0, BLOCK)
            tied = ((keys == edge) & (i < n)).to(tl.int32)
            w = tl.exp((values - top) / t)
            stays = (keys > edge) | ((tied > 0) & (seen + tl.cumsum(tied, 0) <= ties))
            w = tl.where(stays & (w >= least), w, 0.0)
            first = tl.min(tl.where((running + tl.cumsum(w, 0) > goal) & (w > 0.0), i, V), 0)
            chosen = tl.where(first < V, first, chosen)
            running += tl.sum(w, 0)
            seen += tl.sum(tied, 0)
    return chosen


@triton.jit
def choose(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    uniform,
    part_max,
    part_at,
    part_sum,
    part_count,
    part_reach,
    candidate,
    candidate_at,
    tokens,
    tokens_host,
    V: tl.constexpr,
    PIECES: tl.constexpr,
    PIECES_2: tl.constexpr,
    PIECE: tl.constexpr,
    ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
):
    """The token of a row, here and on the host; -1: a logit is NaN or infinite; -2: all are minus that."""
    n = tl.program_id(0)
    p = tl.arange(0, PIECES_2)
    part = n * PIECES + p
    inside = p < PIECES
    top = _largest(part_max, n, PIECES, PIECES_2)
    tops = tl.load(part_max + part, mask=inside, other=float("-inf"))
    at = tl.load(part_at + part, mask=inside, other=V)
    token = tl.min(tl.where((tops == top) & inside, at, V), 0)
    t = tl.load(temperature + n)
    if top != top:
        token = tl.full([], -1, tl.int32)
    elif top == float("-inf"):
        token = tl.full([], -2, tl.int32)
    elif t != 0.0:
        row = logits + n.to(tl.int64) * V
        k = tl.load(top_k + n)
        share = tl.load(top_p + n)
        least = tl.load(min_p + n)
        u = tl.load(uniform + n)
        sums = tl.load(part_sum + part, mask=inside, other=0.0)
        everything = tl.sum(sums, 0)
        if ((k > 0) & (k < V)) | (share < 1.0):
            reach = tl.min(tl.load(part_reach + part, mask=inside, other=REACH), 0)
            counts = tl.load(part_count + part, mask=inside, other=0)
            # A little above the bound, so that it does not matter how that is rounded where.
            lowest = tl.minimum(_ordered(top - reach * t) + 64, _ordered(top))
            few = candidate + n.to(tl.int64) * (PIECES * ROOM)
            few_at = candidate_at + n.to(tl.int64) * (PIECES * ROOM)
            found = tl.full([], 0, tl.int32)
            fits = reach > 0.0
            if fits:  # move the pieces' candidates together, those of the narrowest reach
                for piece in range(0, PIECES):
                    count = tl.sum(tl.where(p == piece, counts, 0), 0)
                    for start in range(0, count, BLOCK):
                        j = start + tl.arange(0, BLOCK)
                        value = tl.load(few + piece * ROOM + j, mask=j < count, other=float("-inf"))
                        index = tl.load(few_at + piece * ROOM + j, mask=j < count, other=0)
                        stays = ((_ordered(value) >= lowest) & (j < count)).to(tl.int32)
                        place = found + tl.cumsum(stays, 0) - 1
                        tl.debug_barrier()
                        tl.store(few + place, value, mask=stays > 0)
                        tl.store(few_at + place, index, mask=stays > 0)
                        tl.debug_barrier()
                        found += tl.sum(stays, 0)
                count, weight = _above(few, found, lowest, top, t, BLOCK)
                fits = tl.where((k > 0) & (k < V), found >= k, weight >= share * everything)
            if fits:
                edge, ties = _limits(few, found, lowest, top, t, k, share, everything, V, BLOCK)
                drawn = _draw(few, found, edge, ties, least, top, t, u, V, BLOCK)
                if drawn >= 0:
                    token = tl.load(few_at + drawn)
            else:
                lowest = tl.full([], -2147483648, tl.int32)
                edge, ties = _limits(row, V, lowest, top, t, k, share, everything, V, ROW_BLOCK)
                drawn = _draw(row, V, edge, ties, least, top, t, u, V, ROW_BLOCK)
                if drawn >= 0:
                    token = drawn
        else:
            # The piece in which the running sum gets there, and the place in it.
            goal = u * everything
            ends = tl.cumsum(sums, 0)
            piece = tl.min(tl.where((ends > goal) & (sums > 0.0) & inside, p, PIECES), 0)
            if piece < PIECES:
                running = tl.sum(tl.where(p < piece, sums, 0.0), 0)
                found = tl.full([], 0, tl.int32)
                last = token
                for start in range(0, PIECE, BLOCK):
                    if found == 0:
                        values = _load(row, piece * PIECE + start, V, BLOCK)
                        w = tl.exp((values - top) / t)
                        w = tl.where(w >= least, w, 0.0)
                        i = piece * PIECE + start + tl.arange(0, BLOCK)
                        first = tl.min(tl.where((running + tl.cumsum(w, 0) > goal) & (w > 0.0), i, V), 0)
                        found = (first < V).to(tl.int32)
                        last = tl.where(first < V, first, tl.max(tl.where(w > 0.0, i, 0), 0))
                        running += tl.sum(w, 0)
                token = last
    tl.store(tokens + n, token)
    tl.store(tokens_host + n, token)
