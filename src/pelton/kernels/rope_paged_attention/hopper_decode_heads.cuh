// Of hopper_decode.cu: elements, and heads of the step, normalised and rotated in registers.
//
// Four lanes share a head, in chunks of 8 elements. A product sums over a head's dimensions in any order that both of its
// operands have: so each lane takes those pairs of chunks that rotate with each other.
#pragma once
#include "hopper.cuh"
#include "codes.cuh"

typedef unsigned char u8;
typedef unsigned short u16;
#include "shared.cuh"

constexpr int CHUNKS = D / 8, SLOTS = D / 32;    // chunks of a head, and of a lane
constexpr u32 ROW_BYTES = KV_CODE ? D : 2 * D;  // of a head in a cache
constexpr int TURN_CHUNKS = TURN / 8;
static_assert(TURN % 8 == 0, "chunks rotate with whole chunks");
#define NEGATIVE_INFINITY __int_as_float(0xff800000)

DEVICE float to_float(u16 x) {
#if HALF
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
#else
    return __int_as_float(int(x) << 16);
#endif
}

DEVICE u16 to_element(float x) {
    u16 y;
    asm("cvt.rn." ELEMENT ".f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}

#if WEIGHTS32
typedef float Weight;
#else
typedef u16 Weight;
#endif

DEVICE void load_8(float (&y)[8], const float* x) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float4 four = reinterpret_cast<const float4*>(x)[i];
        y[4 * i] = four.x, y[4 * i + 1] = four.y, y[4 * i + 2] = four.z, y[4 * i + 3] = four.w;
    }
}
DEVICE void load_8(float (&y)[8], const u16* x) {
    const uint4 eight = *reinterpret_cast<const uint4*>(x);
    const u32 words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] = to_float(u16(words[i / 2] >> i % 2 * 16));
}

// The chunk that this lane has in a slot; slots 2 m and 2 m + 1 are a pair.
DEVICE int chunk_of(int slot) {
    const int pair = slot / 2 * 4 + threadIdx.x % 4;
    return pair < TURN_CHUNKS ? pair + slot % 2 * TURN_CHUNKS : 2 * pair + slot % 2;
}

// Of a lane's pairs.
struct Angles {
    float cosine[SLOTS / 2][8], sine[SLOTS / 2][8];

    DEVICE explicit Angles(const float* cos_sin) {
#pragma unroll
        for (int m = 0; m < SLOTS / 2; ++m) {
            const int pair = 4 * m + threadIdx.x % 4;
            if (pair < TURN_CHUNKS) {
                load_8(cosine[m], cos_sin + 8 * pair);
                load_8(sine[m], cos_sin + TURN + 8 * pair);
            } else {
#pragma unroll
                for (int i = 0; i < 8; ++i) cosine[m][i] = 1.0f, sine[m][i] = 0.0f;
            }
        }
    }
};

// A lane's chunks of the head at `x`, as pairs of elements; zeros where there is none.
template <bool NORM>
DEVICE void rotate(u32 (&out)[SLOTS][4], const u16* x, bool there, const Weight* weight, const Angles& angles,
                   float eps) {
    float values[SLOTS][8], squares = 0.0f;
#pragma unroll
    for (int slot = 0; slot < SLOTS; ++slot) {
#pragma unroll
        for (int i = 0; i < 8; ++i) values[slot][i] = 0.0f;
        if (there) load_8(values[slot], x + 8 * chunk_of(slot));
    }
    if (NORM) {
#pragma unroll
        for (int slot = 0; slot < SLOTS; ++slot)
#pragma unroll
            for (int i = 0; i < 8; ++i) squares += values[slot][i] * values[slot][i];
        squares += __shfl_xor_sync(0xffffffff, squares, 1);
        squares += __shfl_xor_sync(0xffffffff, squares, 2);
        const float scale = rsqrtf(squares / D + eps);
#pragma unroll
        for (int slot = 0; slot < SLOTS; ++slot) {
            float gains[8];
            load_8(gains, weight + 8 * chunk_of(slot));
            // Rounded where the reference rounds: the norm's result has the element type.
#pragma unroll
            for (int i = 0; i < 8; ++i) values[slot][i] = to_float(to_element(values[slot][i] * scale * gains[i]));
        }
    }
#pragma unroll
    for (int slot = 0; slot < SLOTS; slot += 2) {
        const float(&a)[8] = values[slot];
        const float(&b)[8] = values[slot + 1];
        const float(&cosine)[8] = angles.cosine[slot / 2];
        const float(&sine)[8] = angles.sine[slot / 2];
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            out[slot][i / 2] = pack(a[i] * cosine[i] - b[i] * sine[i], a[i + 1] * cosine[i + 1] - b[i + 1] * sine[i + 1]);
            out[slot + 1][i / 2] =
                pack(b[i] * cosine[i] + a[i] * sine[i], b[i + 1] * cosine[i + 1] + a[i + 1] * sine[i + 1]);
        }
    }
}
