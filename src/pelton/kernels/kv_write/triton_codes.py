"""Keys and values as a cache of any type holds them: in 8 bits, codes with a scale (``ir/kv_codes.py``)."""

import triton
import triton.language as tl


@triton.jit
def encode(x, scale, kind: tl.constexpr):
    """``x`` (float32, or what the cache holds) for a cache of type ``kind``; ``scale``: None, or a number."""
    if kind == tl.int8:
        if scale is not None:
            x = tl.div_rn(x.to(tl.float32), scale)
        x = tl.clamp(x.to(tl.float32), -127.0, 127.0)
        # To the nearest, halves to the even: what is beyond 2^23 has no bits for fractions.
        return ((x + 12582912.0) - 12582912.0).to(tl.int8)
    elif kind == tl.float8e4nv:
        if scale is not None:
            x = tl.div_rn(x.to(tl.float32), scale)
        x = tl.clamp(x.to(tl.float32), -448.0, 448.0)
        # To the nearest value of 3 bits of fraction, halves to the even, or multiple of 2^-9 below 2^-6:
        # what the conversion does on a GPU, but not in Triton's interpreter.
        bits = x.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        x = tl.where(tl.abs(x) < 0.015625, (x + 24576.0) - 24576.0, normal)
        return x.to(tl.float8e4nv)
    else:
        return x.to(kind)
