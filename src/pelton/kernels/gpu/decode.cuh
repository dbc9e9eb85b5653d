// What kernels read of a weight in the layout mma16 (gpu_layouts.py). Constants: INNER columns; CODE (u4 0, e4m3 1,
// s8 2, u8 3, e2m1 4); GROUP (columns of a scale; 0: the row), HALF_SCALES (float16 instead of float32), ZERO (zero
// points); GATED (0: no; else the activation: silu 1, gelu 2, gelu_tanh 3, relu 4).
#pragma once
#include "activation.cuh"

typedef unsigned int u32;
typedef unsigned char u8;
typedef unsigned short u16;
#ifndef DEVICE
#define DEVICE __device__ __forceinline__
#endif

constexpr bool EIGHT = CODE == 1 || CODE == 2 || CODE == 3;
constexpr int CODE_BYTES = INNER / (EIGHT ? 32 : 64) * 512;
constexpr int SCALE_BYTES = HALF_SCALES ? 2 : 4, AREA = 16 * (SCALE_BYTES + ZERO);
constexpr long long PANEL_BYTES = CODE_BYTES + (GROUP > 0 ? (long long)(INNER / (GROUP > 0 ? GROUP : 1)) * AREA : 64);

DEVICE float low_half(u32 w) { return __uint_as_float(w << 16); }
DEVICE float high_half(u32 w) { return __uint_as_float(w & 0xffff0000u); }
DEVICE u32 pack_bf16(float low, float high) {
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
DEVICE float rounded(float x) { return low_half(pack_bf16(x, 0.0f)); }
DEVICE u32 fma2(u32 a, u32 b, u32 c) {
    u32 y;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
    return y;
}
constexpr u32 ONE = 0x3f803f80, MINUS_ZERO = 0x80008000;

// A word of codes: columns 2q and 2q + 1 of row g, then of row g + 8, as pairs of bfloat16. `less`: the zero point
// of each row, as `less_of` gives it.
DEVICE void decode(u32 word, u32 nibble, const u32 (&less)[2], u32& a, u32& b) {
    if (CODE == 0) {  // 0x4300 | q is 128 + q
        const u32 q = (nibble ? word >> 4 : word) & 0x0f0f0f0f;
        a = fma2(__byte_perm(q, 0x43434343, 0x4140), ONE, less[0]);
        b = fma2(__byte_perm(q, 0x43434343, 0x4342), ONE, less[1]);
    } else if (CODE == 1) {  // exponent and fraction move into bfloat16's; 2^120 makes up for their biases
        u32 x = __byte_perm(word, 0, 0x1404), y = __byte_perm(word, 0, 0x3424);
        x = (x & 0x80008000) | ((x >> 4) & 0x07f007f0);
        y = (y & 0x80008000) | ((y >> 4) & 0x07f007f0);
        a = fma2(x, 0x7b807b80, MINUS_ZERO);
        b = fma2(y, 0x7b807b80, MINUS_ZERO);
    } else if (CODE == 4) {  // likewise, 2^126
        const u32 q = nibble ? word >> 4 : word;
        const u32 x = __byte_perm(q, 0, 0x4140), y = __byte_perm(q, 0, 0x4342);
        a = fma2(((x << 12) & 0x80008000) | ((x << 6) & 0x01c001c0), 0x7e807e80, MINUS_ZERO);
        b = fma2(((y << 12) & 0x80008000) | ((y << 6) & 0x01c001c0), 0x7e807e80, MINUS_ZERO);
    } else {  // the low 7 bits as 128 more, less 128 or, of a negative number, 256: 0x4300 | sign bit
        const u32 s = CODE == 3 ? word ^ 0x80808080 : word;
        const u32 low = s & 0x7f7f7f7f, sign = s & 0x80808080;
        a = fma2(__byte_perm(sign, 0x43434343, 0x4140), 0xbf80bf80, __byte_perm(low, 0x43434343, 0x4140));
        b = fma2(__byte_perm(sign, 0x43434343, 0x4342), 0xbf80bf80, __byte_perm(low, 0x43434343, 0x4342));
        if (ZERO) {
            a = fma2(a, ONE, less[0]);
            b = fma2(b, ONE, less[1]);
        }
    }
}

// A scale as stored, as a number.
DEVICE float scale_of(u32 stored) {
    float y;
    if (HALF_SCALES)
        asm("{.reg .b16 t; cvt.u16.u32 t, %1; cvt.f32.f16 %0, t;}" : "=f"(y) : "r"(stored));
    else
        y = __uint_as_float(stored);
    return y;
}

// What is added to decoded codes for a zero point: a pair of bfloat16.
DEVICE u32 less_of(u32 zero) {
    if (!ZERO) return 0;
    if (CODE == 3) {
        const float z = 128.0f - float(zero);
        return pack_bf16(z, z);
    }
    return (0xc300u | zero) * 0x10001u;
}
