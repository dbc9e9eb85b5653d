// Of hopper_decode.cu: tiles of keys and values that the caches hold in 8 bits. What is multiplied is float16, in which
// codes of either type are exact; of queries and softmax it keeps more than bfloat16 does, within its range.
//
// Constant: KV_CODE (1: int8, 2: e4m3).
#pragma once
#include "hopper_decode_heads.cuh"

typedef u8 Cached;
constexpr int KEYS = 32;

// Of keys sixteen lanes read 32 bytes of four rows, of values the same of every second row: turned so that these are
// in all banks, of rows of 64 bytes in half of them.
DEVICE u32 place(int turn, int row, int chunk) { return row * ROW_BYTES + ((chunk ^ turn % (D / 32) * 2) << 4); }
DEVICE u32 key_place(int row, int chunk) { return place(D == 64 ? row / 2 : row, row, chunk); }
DEVICE u32 value_place(int row, int chunk) { return place(row / 2, row, chunk); }

DEVICE uint2 get_words(u32 at) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at) : "memory");
    return v;
}
DEVICE u32 operands(float low, float high) {
    u32 y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
DEVICE float of_half(u32 bits) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(u16(bits)));
    return y;
}
DEVICE u32 halves_of_e4m3(u32 two) {
    u32 y;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(y) : "h"(u16(two)));
    return y;
}
DEVICE u32 less_1152(u32 x) {
    u32 y;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(x), "r"(0x64806480));
    return y;
}

DEVICE u32 operands_of(u32 elements) {
    const float low = to_float(u16(elements)), high = to_float(u16(elements >> 16));
    return operands(fminf(fmaxf(low, -65504.0f), 65504.0f), fminf(fmaxf(high, -65504.0f), 65504.0f));
}

// Four codes, two to a word.
DEVICE void expand(u32& low, u32& high, u32 codes) {
    if (KV_CODE == 1) {
        // With its sign turned a code is 128 more, and below 0x64 it is 1024 more as float16.
        const u32 positive = codes ^ 0x80808080;
        low = less_1152(__byte_perm(positive, 0x64646464, 0x4140));
        high = less_1152(__byte_perm(positive, 0x64646464, 0x4342));
    } else {
        low = halves_of_e4m3(codes);
        high = halves_of_e4m3(codes >> 16);
    }
}

// This lane's chunks of the key in a row.
DEVICE void load_key(u32 (&words)[SLOTS][4], u32 tile, int row) {
#pragma unroll
    for (int slot = 0; slot < SLOTS; ++slot) {
        const int chunk = chunk_of(slot);
        const uint2 codes = get_words(tile + key_place(row, chunk / 2) + chunk % 2 * 8);
        expand(words[slot][0], words[slot][1], codes.x);
        expand(words[slot][2], words[slot][3], codes.y);
    }
}

// Which dimension of the result a product's row `lane / 4` of the `eight`-th eight is: a lane has eight adjacent ones of
// each 64, since it reads them together.
DEVICE int first_of(int eight) { return 64 * (eight / 8) + 8 * (threadIdx.x % 32 / 4); }
DEVICE int dimension(int eight) { return first_of(eight) + eight % 8; }

// Values of 16 keys of the tile, D / 16 operands. A word of one has two keys of a dimension.
DEVICE void load_values(u32 (&values)[D / 16][4], u32 tile, int block) {
    const int lane = threadIdx.x % 32, row = 16 * block + lane % 4 * 2;
#pragma unroll
    for (int part = 0; part < D / 64; ++part) {
        const int byte = 64 * part + lane / 4 * 8;
#pragma unroll
        for (int later = 0; later < 2; ++later) {
            const int key = row + 8 * later;
            const uint2 even = get_words(tile + value_place(key, byte / 16) + byte % 16);
            const uint2 odd = get_words(tile + value_place(key + 1, byte / 16) + byte % 16);
            u32(*four)[4] = values + 4 * part;
            expand(four[0][2 * later], four[0][2 * later + 1], __byte_perm(even.x, odd.x, 0x5140));
            expand(four[1][2 * later], four[1][2 * later + 1], __byte_perm(even.x, odd.x, 0x7362));
            expand(four[2][2 * later], four[2][2 * later + 1], __byte_perm(even.y, odd.y, 0x5140));
            expand(four[3][2 * later], four[3][2 * later + 1], __byte_perm(even.y, odd.y, 0x7362));
        }
    }
}

DEVICE u32 codes_of(float low, float high) {
    if (KV_CODE == 2) return to_e4m3(low, high);
    const int a = __float2int_rn(fminf(fmaxf(low, -127.0f), 127.0f)), b = __float2int_rn(fminf(fmaxf(high, -127.0f), 127.0f));
    return (a & 255) | (b & 255) << 8;
}

// x / scale, rounded as a division is (Markstein, 1990): codes are the reference's bit for bit. What is beyond all codes
// stays so.
DEVICE float divided(float x, float scale, float inverse) {
    const float y = x * inverse;
    return fabsf(y) < 1e6f ? __fmaf_rn(__fmaf_rn(-y, scale, x), inverse, y) : y;
}

// A new head's chunk, as the cache holds it, as operands and as numbers.
struct NewChunk {
    u32 codes[2], words[4];
    DEVICE NewChunk(const u32 (&elements)[4], float scale) {
        const float inverse = 1.0f / scale;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            u32 two[2];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const u32 pair = elements[2 * i + j];
                const float low = to_float(u16(pair)), high = to_float(u16(pair >> 16));
                two[j] = codes_of(divided(low, scale, inverse), divided(high, scale, inverse));
            }
            codes[i] = two[0] | two[1] << 16;
            expand(words[2 * i], words[2 * i + 1], codes[i]);
        }
    }
    DEVICE void store(Cached* there) const { *reinterpret_cast<uint2*>(there) = make_uint2(codes[0], codes[1]); }
    DEVICE float number(int i) const { return of_half(words[i / 2] >> i % 2 * 16 & 0xffff); }
};
