"""Masks, bias and penalties on rows of logits in Triton, by the rules of ``runtime.logits``, and
log-probabilities.

A sequence that has any of them has a *seat*: a row in each of the tables of this file.
``counts``: a number for each token: how often it was generated, and 0x8000 more if the prompt has it.
``allowed``: a bit for each token. ``ids``, ``values``: a list of (token, what is added to its logit), -inf
for tokens that are excluded; behind the first ``lengths[0]``, ``lengths[1]`` that count only while the answer
is shorter than min_tokens. Rows with seat -1 are left as they are.
"""

import triton
import triton.language as tl


@triton.jit
def mark(counts, pairs, n, sampled, unknown, BLOCK: tl.constexpr):
    """Put ``n`` pairs of (token, number) into a row of zeros; ``unknown`` below zero is a token more that the
    step before has sampled: -1 for its row 0."""
    for start in range(0, n, BLOCK):
        i = start + tl.arange(0, BLOCK)
        token = tl.load(pairs + 2 * i, mask=i < n, other=0)
        number = tl.load(pairs + 2 * i + 1, mask=i < n, other=0)
        tl.store(counts + token, number.to(tl.int16), mask=i < n)
    if unknown < 0:
        tl.debug_barrier()
        token = tl.load(sampled - unknown - 1)
        if token >= 0:
            tl.store(counts + token, tl.load(counts + token) + 1)


@triton.jit
def keep(logits, seat, wanted, kept, V: tl.constexpr, PIECE: tl.constexpr):
    """Copy rows whose log-probabilities are wanted (not below zero) and that will be edited."""
    n = tl.program_id(0)
    if (tl.load(seat + n) < 0) | (tl.load(wanted + n) < 0):
        return
    i = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    at = n.to(tl.int64) * V + i
    tl.store(kept + at, tl.load(logits + at, mask=i < V), mask=i < V)


@triton.jit
def bias(logits, seat, short, ids, values, lengths, V: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr):
    """Add the list of each row; ``short``: whether its answer is shorter than min_tokens."""
    n = tl.program_id(0)
    s = tl.load(seat + n).to(tl.int64)
    if s < 0:
        return
    row = logits + n.to(tl.int64) * V
    always = tl.load(lengths + 2 * s)
    for start in range(0, always, BLOCK):
        i = start + tl.arange(0, BLOCK)
        token = tl.load(ids + s * ROOM + i, mask=i < always, other=0)
        value = tl.load(values + s * ROOM + i, mask=i < always, other=0.0)
        tl.store(row + token, tl.load(row + token, mask=i < always) + value, mask=i < always)
    if tl.load(short + n) != 0:
        tl.debug_barrier()
        ends = tl.load(lengths + 2 * s + 1)
        for start in range(0, ends, BLOCK):
            i = start + tl.arange(0, BLOCK)
            token = tl.load(ids + s * ROOM + always + i, mask=i < ends, other=0)
            tl.store(row + token, float("-inf"), mask=i < ends)


@triton.jit
def edit(
    logits,
    seat,
    masked,
    repetition,
    frequency,
    presence,
    counts,
    allowed,
    V: tl.constexpr,
    WORDS: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Penalties, and ``masked``: whether only the allowed tokens may come."""
    n = tl.program_id(0)
    s = tl.load(seat + n).to(tl.int64)
    if s < 0:
        return
    i = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    at = n.to(tl.int64) * V + i
    x = tl.load(logits + at, mask=i < V, other=0.0)
    again = tl.load(repetition + n)
    often = tl.load(frequency + n)
    once = tl.load(presence + n)
    if (again != 1.0) | (often != 0.0) | (once != 0.0):
        number = tl.load(counts + s * V + i, mask=i < V, other=0).to(tl.int32) & 0xFFFF
        times = (number & 0x7FFF).to(tl.float32)
        x = tl.where(number != 0, tl.where(x > 0, tl.math.div_rn(x, again), x * again), x)
        x -= often * times
        x -= once * (times > 0).to(tl.float32)
    if tl.load(masked + n) != 0:
        word = tl.load(allowed + s * WORDS + i // 32, mask=i < V, other=0)
        x = tl.where(((word >> (i % 32)) & 1) != 0, x, float("-inf"))
    tl.store(logits + at, x, mask=i < V)


@triton.jit
def count(seat, tokens, counts, V: tl.constexpr):
    """Count the token of each row."""
    n = tl.program_id(0)
    s = tl.load(seat + n).to(tl.int64)
    token = tl.load(tokens + n)
    if (s >= 0) & (token >= 0):
        number = tl.load(counts + s * V + token)
        if (number.to(tl.int32) & 0x7FFF) < 0x7FFF:
            tl.store(counts + s * V + token, number + 1)


@triton.jit
def logprobs(
    logits,
    kept,
    seat,
    wanted,
    tokens,
    values,
    ranks,
    ids,
    V: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of each row with ``wanted`` not below zero: log-probability and rank of its token, then that many of
    the most likely tokens: ``values`` (N, 1 + MOST), ``ids`` (N, MOST)."""
    n = tl.program_id(0)
    most = tl.load(wanted + n)
    token = tl.load(tokens + n)
    if (most < 0) | (token < 0):
        return
    row = logits + n.to(tl.int64) * V
    if tl.load(seat + n) >= 0:
        row = kept + n.to(tl.int64) * V
    mine = tl.load(row + token)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    larger = tl.zeros([BLOCK], tl.int32)
    for start in range(0, V, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(row + i, mask=i < V, other=float("-inf"))
        x = tl.where(x == x, x, float("-inf"))
        larger += (x > mine).to(tl.int32)
        up = tl.maximum(best, x)
        shift = tl.where(up == float("-inf"), 0.0, up)
        total = total * tl.exp(best - shift) + tl.exp(x - shift)
        best = up
    top = tl.max(best, 0)
    log_sum = tl.log(tl.sum(total * tl.exp(best - top), 0))
    tl.store(values + n * (1 + MOST), (mine - top) - log_sum)
    tl.store(ranks + n, 1 + tl.sum(larger, 0))
    last = tl.full([], float("inf"), tl.float32)
    last_at = tl.full([], -1, tl.int32)
    for k in range(0, most):  # the largest behind the one before; of equal ones the first
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        where = tl.full([BLOCK], V, tl.int32)
        for start in range(0, V, BLOCK):
            i = start + tl.arange(0, BLOCK)
            x = tl.load(row + i, mask=i < V, other=float("-inf"))
            x = tl.where(x == x, x, float("-inf"))
            behind = ((x < last) | ((x == last) & (i > last_at))) & (i < V)
            better = behind & ((x > best) | (where == V))
            best = tl.where(better, x, best)
            where = tl.where(better, i, where)
        last = tl.max(tl.where(where < V, best, float("-inf")), 0)
        last_at = tl.min(tl.where(best == last, where, V), 0)
        tl.store(values + n * (1 + MOST) + 1 + k, (last - top) - log_sum)
        tl.store(ids + n * MOST + k, last_at)
