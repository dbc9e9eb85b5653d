"""Keys and values as a cache of any type holds them: in 8 bits, codes with a scale (``ir/kv_codes.py``)."""

import triton
import triton.language as tl


@triton.jit
def encode(x, scale, kind: tl.constexpr):
    """``x`` (float32, or what the cache holds) for a cache of type ``kind``; ``scale``: None, or a number."""
    if kind == tl.int8 or kind == tl.float8e4nv:
        return rounded(in_range(x, scale, kind), kind).to(kind)
    else:
        return x.to(kind)


@triton.jit
def encode_key(x, scale, along, apart, kind: tl.constexpr):
    """Keys, one a row, with ``look_again`` of ``ir/kv_codes.py``; ``along``, ``apart``: its u and r."""
    x = in_range(x, scale, kind)
    code = rounded(x, kind)
    error = code - x
    if kind == tl.int8:
        step = tl.full(code.shape, 1.0, tl.float32)
        largest: tl.constexpr = 127.0
    else:
        bits = tl.maximum(tl.abs(code), 0.015625).to(tl.int32, bitcast=True)
        step = ((bits & 0x7F800000) - 0x1800000).to(tl.float32, bitcast=True)
        largest: tl.constexpr = 448.0
    move = tl.where(error > 0.0, -step, tl.where(error < 0.0, step, 0.0))
    score = tl.sum(error * along, 1)[:, None]
    change = move * along * (2.0 * score + move * along) + move * (2.0 * error + move) * apart
    change = tl.where(tl.abs(code + move) <= largest, change, float("inf"))
    best = tl.min(change, 1)[:, None]
    return tl.where((change == best) & (change < 0.0), code + move, code).to(kind)


@triton.jit
def in_range(x, scale, kind: tl.constexpr):
    """In units of codes, at most the largest."""
    largest: tl.constexpr = 127.0 if kind == tl.int8 else 448.0
    if scale is not None:
        x = tl.div_rn(x.to(tl.float32), scale)
    return tl.clamp(x.to(tl.float32), -largest, largest)


@triton.jit
def rounded(x, kind: tl.constexpr):
    """To the value of a code."""
    if kind == tl.int8:
        # To the nearest, halves to the even: what is beyond 2^23 has no bits for fractions.
        return (x + 12582912.0) - 12582912.0
    else:
        # To the nearest value of 3 bits of fraction, halves to the even, or multiple of 2^-9 below 2^-6:
        # what the conversion does on a GPU, but not in Triton's interpreter.
        bits = x.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        return tl.where(tl.abs(x) < 0.015625, (x + 24576.0) - 24576.0, normal)
