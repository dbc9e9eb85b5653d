// What kernels read of a weight in the layout mma16 (gpu_layouts.py). Constants: INNER columns; CODE (u4 0, e4m3 1,
// s8 2, u8 3, e2m1 4, nf4 5, u5 6, u6 7); GROUP (columns of a scale; 0: the row), HALF_SCALES (float16 instead of
// float32), BYTE_SCALES (instead: e4m3 1, with a float32 of the row; e8m0 2), SUPER_SCALES (instead: integers, times a
// float16 of 128 columns), ZERO (zero points), OFFSET (an offset a group), MIDDLE (what codes are more than they mean);
// GATED (0: no; else the activation: silu 1, gelu 2, gelu_tanh 3, relu 4).
#pragma once
#include "activation.cuh"

typedef unsigned int u32;
typedef unsigned char u8;
typedef unsigned short u16;
#ifndef DEVICE
#define DEVICE __device__ __forceinline__
#endif

#ifndef BYTE_SCALES
#define BYTE_SCALES 0
#endif
#ifndef SUPER_SCALES
#define SUPER_SCALES 0
#define OFFSET 0
#define MIDDLE 0
#endif

constexpr bool EIGHT = CODE == 1 || CODE == 2 || CODE == 3;
constexpr int UPPER = CODE == 6 ? 1 : CODE == 7 ? 2 : 0;  // bits of a code above 4, words of a lane for a block's
constexpr int BLOCK_BYTES = 512 + 128 * UPPER;
constexpr int CODE_BYTES = INNER / (EIGHT ? 32 : 64) * BLOCK_BYTES;
// A group's scales and what goes with them; of SUPER_SCALES 128 columns' (gpu_gguf.py).
constexpr int SCALE_BYTES = BYTE_SCALES ? 1 : HALF_SCALES ? 2 : 4, PAIR = 1 + OFFSET;
constexpr int AREA = SUPER_SCALES ? 16 * PAIR * (2 + 128 / (GROUP > 0 ? GROUP : 1)) : 16 * (SCALE_BYTES * PAIR + ZERO);
constexpr int AREA_COLUMNS = SUPER_SCALES ? 128 : GROUP;
constexpr int AREAS_AT = CODE_BYTES + (BYTE_SCALES == 1 ? 64 : 0);
constexpr long long PANEL_BYTES = AREAS_AT + (GROUP > 0 ? (long long)(INNER / (GROUP > 0 ? AREA_COLUMNS : 1)) * AREA : 64);

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

// e4m3 and e2m1, exponent and fraction moved into bfloat16's: the code divided by SMALL_INVERSE. Pairs as `decode`'s.
constexpr float SMALL_INVERSE = CODE == 1 ? 0x1p120f : 0x1p126f;
DEVICE void decode_small(u32 word, u32 nibble, u32& a, u32& b) {
    if (CODE == 1) {  // bytes of four
        const u32 low = word << 4 & 0xf0f0f0f0, high = (word & 0x80808080) | (word >> 4 & 0x07070707);
        a = __byte_perm(low, high, 0x5140);
        b = __byte_perm(low, high, 0x7362);
    } else {  // the sign to bit 15, the rest to bits 6 to 8
        const u32 mask = nibble ? 0x00f000f0 : 0x000f000f, factor = nibble ? 0x0104 : 0x1040;
        a = ((__byte_perm(word, 0, 0x1100) & mask) * factor) & 0x81c081c0;
        b = ((__byte_perm(word, 0, 0x3322) & mask) * factor) & 0x81c081c0;
    }
}

// Codes of up to 6 bits in a word's nibbles, the index-th word of a lane's four, one a byte. `upper`: their block's.
DEVICE u32 bytes_of(u32 word, u32 nibble, const u32 (&upper)[2], int index) {
    const u32 q = (nibble ? word >> 4 : word) & 0x0f0f0f0f;
    if (!UPPER) return q;
    const int to = UPPER == 1 ? 4 - 4 * int(nibble) - index : 4 - 2 * index;
    const u32 w = upper[UPPER == 2 ? nibble : 0];
    return q | ((to >= 0 ? w << max(to, 0) : w >> max(-to, 0)) & (UPPER == 1 ? 0x10101010 : 0x30303030));
}

// A word of codes: columns 2q and 2q + 1 of row g, then of row g + 8, as pairs of bfloat16. `less`: the zero point
// of each row, as `less_of` gives it; `upper` and `index` as in `bytes_of`.
DEVICE void decode(u32 word, u32 nibble, const u32 (&less)[2], u32& a, u32& b, const u32 (&upper)[2] = {0, 0}, int index = 0) {
    if (CODE == 0 || UPPER) {  // 0x4300 | q is 128 + q
        const u32 q = bytes_of(word, nibble, upper, index);
        a = fma2(__byte_perm(q, 0x43434343, 0x4140), ONE, less[0]);
        b = fma2(__byte_perm(q, 0x43434343, 0x4342), ONE, less[1]);
    } else if (CODE == 1) {  // 2^120 makes up for the biases of the exponents
        decode_small(word, nibble, a, b);
        a = fma2(a, 0x7b807b80, MINUS_ZERO);
        b = fma2(b, 0x7b807b80, MINUS_ZERO);
    } else if (CODE == 4) {  // likewise, 2^126
        decode_small(word, nibble, a, b);
        a = fma2(a, 0x7e807e80, MINUS_ZERO);
        b = fma2(b, 0x7e807e80, MINUS_ZERO);
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

// A word of u8, times each row's scale; `plus`: less the zero point and 2^15, scaled.
DEVICE void decode_scaled(u32 word, const float (&scale)[2], const float (&plus)[2], u32& a, u32& b) {
    float v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)  // 0x47000000 | code << 8 is 2^15 + code
        v[i] = __fmaf_rn(__uint_as_float(__byte_perm(word, 0x47000000, 0x7404 | i << 4)), scale[i / 2], plus[i / 2]);
    a = pack_bf16(v[0], v[1]);
    b = pack_bf16(v[2], v[3]);
}
DEVICE float plus_of(u32 zero, float scale) { return -(32768.0f + float(zero)) * scale; }

// The bytes of nf4's values in bfloat16.
struct Nf4 {
    u32 low[4] = {0xca063280, 0x00ba3d92, 0xad7c25a3, 0x803910e2}, high[4] = {0xbebfbfbf, 0x00bdbebe, 0x3e3e3e3d, 0x3f3f3f3e};
};
// In registers, by a zero that the compiler does not know: constants it would load again at every use.
DEVICE void keep(Nf4& values, u32 zero) {
#pragma unroll
    for (int i = 0; i < 4; ++i) values.low[i] ^= zero, values.high[i] ^= zero;
}
// Bytes of a and b as __byte_perm chooses them, of which selectors above 7 make eight copies of the sign.
DEVICE u32 sign_bytes(u32 a, u32 b, u32 selectors) {
    u32 y;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(selectors));
    return y;
}
// A word of nf4, of both nibbles: bytes of bfloat16 looked up by three bits of a code, and chosen by the fourth.
DEVICE u32 look_up(u32 codes, u32 upper, const u32 (&bytes)[4]) {
    const u32 small = __byte_perm(bytes[0], bytes[1], codes), large = __byte_perm(bytes[2], bytes[3], codes);
    return (small & ~upper) | (large & upper);
}
DEVICE void decode_nf4(u32 word, const Nf4& values, u32 (&a)[2], u32 (&b)[2]) {
    const u32 q = word & 0x77777777, first = word << 4;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        // Of bytes 2 row and 2 row + 1 the low and the high nibble: all ones for codes from 8 on.
        const u32 upper = sign_bytes(first, word, row ? 0xfbea : 0xd9c8), codes = row ? q >> 16 : q;
        const u32 low = look_up(codes, upper, values.low), high = look_up(codes, upper, values.high);
#pragma unroll
        for (int nibble = 0; nibble < 2; ++nibble)
            (row ? b : a)[nibble] = __byte_perm(low, high, nibble ? 0x7351 : 0x6240);
    }
}

DEVICE float of_half(u32 stored) {
    float y;
    asm("{.reg .b16 t; cvt.u16.u32 t, %1; cvt.f32.f16 %0, t;}" : "=f"(y) : "r"(stored));
    return y;
}

// A scale as stored, as a number; of e8m0 not its NaN.
DEVICE float scale_of(u32 stored) {
    if (BYTE_SCALES == 1) return __uint_as_float((stored & 0x80) << 24 | (stored & 0x7f) << 20) * 0x1p120f;
    if (BYTE_SCALES == 2) return __uint_as_float(stored ? stored << 23 : 0x00400000);
    return HALF_SCALES ? of_half(stored) : __uint_as_float(stored);
}

// What is added to decoded codes for a zero point: a pair of bfloat16.
DEVICE u32 less_of(u32 zero) {
    if (!ZERO && !MIDDLE) return 0;
    if (CODE == 3) {
        const float z = 128.0f - float(zero);
        return pack_bf16(z, z);
    }
    return (0xc300u | zero) * 0x10001u;
}
