"""Keys and values as a cache of any type holds them: in 8 bits, codes with a scale (``ir/kv_codes.py``)."""

import triton
import triton.language as tl


@triton.jit
def _in_range(x, scale, kind: tl.constexpr):
    """``x`` in units of codes, float32; ``scale``: None, or numbers."""
    largest: tl.constexpr = 127.0 if kind == tl.int8 else 448.0
    if scale is not None:
        x = tl.div_rn(x.to(tl.float32), scale)
    return tl.clamp(x.to(tl.float32), -largest, largest)


@triton.jit
def _nearest(x, kind: tl.constexpr):
    """Of numbers in range the codes that are nearest, as numbers; halves to the even."""
    if kind == tl.int8:
        # What is beyond 2^23 has no bits for fractions.
        return (x + 12582912.0) - 12582912.0
    else:
        # To the nearest value of 3 bits of fraction, or multiple of 2^-9 below 2^-6: what the conversion does
        # on a GPU, but not in Triton's interpreter.
        bits = x.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        return tl.where(tl.abs(x) < 0.015625, (x + 24576.0) - 24576.0, normal)


@triton.jit
def encode(x, scale, kind: tl.constexpr):
    """``x`` (float32, or what the cache holds) for a cache of type ``kind``; ``scale``: None, or numbers."""
    if kind == tl.int8 or kind == tl.float8e4nv:
        return _nearest(_in_range(x, scale, kind), kind).to(kind)
    else:
        return x.to(kind)


@triton.jit
def encode_keys(x, scale, k_shift, k_queries, head, d, mask, D: tl.constexpr, kind: tl.constexpr):
    """Keys ``x`` of heads ``head``, whose last axis has a head's dimensions ``d``, less ``k_shift`` and
    rounded as ``k_queries`` would have it (either may be None), for a cache of type ``kind``."""
    if k_shift is not None:
        x = x.to(tl.float32) - tl.load(k_shift + head * D + d, mask=mask, other=0.0)
    if k_queries is not None and (kind == tl.int8 or kind == tl.float8e4nv):
        along = tl.load(k_queries + head * (2 * D) + d, mask=mask, other=0.0)
        apart = tl.load(k_queries + head * (2 * D) + D + d, mask=mask, other=0.0)
        x = _in_range(x, scale, kind)
        return _look_again(x, _nearest(x, kind), along, apart, kind).to(kind)
    else:
        return encode(x, scale, kind)


@triton.jit
def _look_again(x, codes, along, apart, kind: tl.constexpr):
    """``kv_codes.look_again``, but for the order in which a key's score is summed."""
    axis: tl.constexpr = len(x.shape) - 1
    largest: tl.constexpr = 127.0 if kind == tl.int8 else 448.0
    if kind == tl.int8:
        step = tl.full(x.shape, 1.0, tl.float32)
    else:
        # An eighth of the power of two below.
        bits = tl.maximum(tl.abs(codes), 0.015625).to(tl.int32, bitcast=True)
        step = ((bits & 0x7F800000) - 0x1800000).to(tl.float32, bitcast=True)
    error = codes - x
    move = tl.where(error > 0, -step, tl.where(error < 0, step, 0.0))
    score = tl.sum(error * along, axis, keep_dims=True)
    turn = move * along
    change = turn * (2 * score + turn) + move * (2 * error + move) * apart
    change = tl.where(tl.abs(codes + move) <= largest, change, float("inf"))
    best = tl.min(change, axis, keep_dims=True)
    return tl.where((change == best) & (change < 0), codes + move, codes)
