"""Codes of quantised weights as numbers, in registers: what any product over packed weights begins with.

``CODE`` says what a byte holds: "u4" (two codes of up to 4 bits), "e2m1" and "nf4" (two of them), "u8" (a
code of 8 bits), "s8" (int8), "e4m3". Where the result is bfloat16 a few instructions make two numbers at once
out of bits; else, and in Triton's interpreter, it is plain arithmetic. Both are exact but for NF4,
whose values are rounded to the result's type.
"""

import os

import triton
import triton.language as tl

#: The interpreter runs no assembly.
_BITS = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") != "1")


@triton.jit
def less_zero(codes, z, CODE: tl.constexpr, T: tl.constexpr):
    """Decoded ``codes`` (rows, columns) less zero points ``z`` (rows) and what decoding left on them."""
    if CODE == "u8":
        return codes - (z.to(T) - 128.0)[:, None]
    elif _BITS and tl.bfloat16 == T:
        return codes - (z.to(T) + 128.0)[:, None]
    else:
        return codes - z.to(T)[:, None]


@triton.jit
def decode8(b, CODE: tl.constexpr, T: tl.constexpr):
    """uint8 tile -> its values as ``T``; of "u8" 128 less."""
    if CODE == "e4m3":
        if _BITS and tl.bfloat16 == T:
            return _e4m3_bf16(b)
        bits = b.to(tl.int32)
        exponent = bits >> 3 & 15
        normal = (((exponent + 120) << 23) | ((bits & 7) << 20)).to(tl.float32, bitcast=True)
        size = tl.where(exponent == 0, (bits & 7).to(tl.float32) * 0.001953125, normal)
        return tl.where(bits >= 128, -size, size).to(T)
    elif _BITS and tl.bfloat16 == T:
        if CODE == "u8":
            return _s8_bf16(b ^ 128)
        else:
            return _s8_bf16(b)
    elif CODE == "u8":
        return (b.to(tl.int32) - 128).to(T)
    else:
        return b.to(tl.int8, bitcast=True).to(T)


@triton.jit
def decode4(b, CODE: tl.constexpr, T: tl.constexpr):
    """uint8 tile -> its low nibbles, its high ones, as ``T``; of "u4" maybe 128 more (``less_zero``)."""
    if CODE == "u4" and _BITS and tl.bfloat16 == T:
        return _u4_bf16(b)
    elif CODE == "e2m1" and _BITS and tl.bfloat16 == T:
        return _e2m1_bf16(b & 15), _e2m1_bf16(b >> 4)
    else:
        return nibble(b & 15, CODE, T), nibble(b >> 4, CODE, T)


@triton.jit
def nibble(q, CODE: tl.constexpr, T: tl.constexpr):
    if CODE == "u4":
        return q.to(T)
    elif CODE == "e2m1":
        size = (q & 7).to(tl.float32)
        # 0, 0.5, 1, 1.5, 2, 3, 4, 6
        size = tl.where(size < 4, size * 0.5, tl.where(size < 6, size - 2, size * 2 - 8))
        return tl.where(q >= 8, -size, size).to(T)
    else:
        return _nf4(q).to(T)


@triton.jit
def _nf4(q):
    """A tree of choices over the code's bits."""
    b0, b1, b2, b3 = (q & 1) != 0, (q & 2) != 0, (q & 4) != 0, (q & 8) != 0
    v0 = tl.where(b0, -0.6961928009986877, -1.0)
    v1 = tl.where(b0, -0.39491748809814453, -0.5250730514526367)
    v2 = tl.where(b0, -0.18477343022823334, -0.28444138169288635)
    v3 = tl.where(b0, 0.0, -0.09105003625154495)
    v4 = tl.where(b0, 0.16093020141124725, 0.07958029955625534)
    v5 = tl.where(b0, 0.33791524171829224, 0.24611230194568634)
    v6 = tl.where(b0, 0.5626170039176941, 0.44070982933044434)
    v7 = tl.where(b0, 1.0, 0.7229568362236023)
    low = tl.where(b2, tl.where(b1, v3, v2), tl.where(b1, v1, v0))
    high = tl.where(b2, tl.where(b1, v7, v6), tl.where(b1, v5, v4))
    return tl.where(b3, high, low)


@triton.jit
def _u4_bf16(b):
    """A nibble below the exponent of 128 is 128 more: 0x4300 | q."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 lo, hi;
        and.b32 lo, $4, 0x0f0f0f0f;
        shr.u32 hi, $4, 4;
        and.b32 hi, hi, 0x0f0f0f0f;
        prmt.b32 $0, lo, 0x43434343, 0x4140;
        prmt.b32 $1, lo, 0x43434343, 0x4342;
        prmt.b32 $2, hi, 0x43434343, 0x4140;
        prmt.b32 $3, hi, 0x43434343, 0x4342;
        }""",
        "=r,=r,=r,=r,r",
        [b],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def _e4m3_bf16(b):
    """Exponent and fraction move into bfloat16's, and 2^120 makes up for their biases, exactly."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, c, s, t, one, zero;
        mov.b32 one, 0x7b807b80;
        mov.b32 zero, 0x80008000;
        prmt.b32 a, $2, 0, 0x1404;
        prmt.b32 c, $2, 0, 0x3424;
        shr.u32 s, a, 4;
        shr.u32 t, c, 4;
        and.b32 s, s, 0x07f007f0;
        and.b32 t, t, 0x07f007f0;
        lop3.b32 s, a, 0x80008000, s, 0xea;
        lop3.b32 t, c, 0x80008000, t, 0xea;
        fma.rn.bf16x2 $0, s, one, zero;
        fma.rn.bf16x2 $1, t, one, zero;
        }""",
        "=r,=r,r",
        [b],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def _e2m1_bf16(b):
    """As e4m3, with 2^126. ``b``: a nibble in each byte."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, c, s, t, one, zero;
        mov.b32 one, 0x7e807e80;
        mov.b32 zero, 0x80008000;
        prmt.b32 a, $2, 0, 0x4140;
        prmt.b32 c, $2, 0, 0x4342;
        shl.b32 s, a, 6;
        shl.b32 t, c, 6;
        shl.b32 a, a, 12;
        shl.b32 c, c, 12;
        and.b32 s, s, 0x01c001c0;
        and.b32 t, t, 0x01c001c0;
        lop3.b32 s, a, 0x80008000, s, 0xea;
        lop3.b32 t, c, 0x80008000, t, 0xea;
        fma.rn.bf16x2 $0, s, one, zero;
        fma.rn.bf16x2 $1, t, one, zero;
        }""",
        "=r,=r,r",
        [b],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def _s8_bf16(b):
    """The low 7 bits as 128 more, less 128 or, of a negative number, 256: 0x4300 | sign bit."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 low, sign, a, c, m;
        and.b32 low, $2, 0x7f7f7f7f;
        and.b32 sign, $2, 0x80808080;
        mov.b32 m, 0xbf80bf80;
        prmt.b32 a, low, 0x43434343, 0x4140;
        prmt.b32 c, sign, 0x43434343, 0x4140;
        fma.rn.bf16x2 $0, c, m, a;
        prmt.b32 a, low, 0x43434343, 0x4342;
        prmt.b32 c, sign, 0x43434343, 0x4342;
        fma.rn.bf16x2 $1, c, m, a;
        }""",
        "=r,=r,r",
        [b],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )
