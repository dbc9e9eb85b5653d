// Rows as 8-bit codes with a float32 scale each, for products of codes (hopper_products.cu); a block takes a row.
// The RMS norm before (NORM) is part of it. Compute capability 9.0.
//
// A value is d q with d = max|x| / 127 (CODE 2: int8) or / 448 (CODE 1: e4m3) of its row, or d = `given` where that is
// not 0: then what is out of reach has the last code. Of EXACT it has two codes,
// in rows 16 i + j and 16 i + j + 8 for row 8 i + j: of int8, high and low byte (-128 to 127) of 16 bits, d = max|x| /
// 32639; of e4m3, the nearest to x / d and the nearest to 16 times what is left, d a power of two: a bfloat16 has 8
// significant bits and either code has 4, so that no bit is lost of values down to 2^-13 of the row's largest.
//
// With GROUP (128 or 0: none) each row and GROUP columns have a scale of their own, those of the next columns X_SCALES
// floats behind.
//
// Constants: CODE, INNER (a multiple of 8), X_ROW (elements from row to row of x), EXACT, NORM, HALF (float16 instead of
// bfloat16), THREADS, GROUP, X_SCALES.
#include "hopper.cuh"
#include "codes.cuh"

typedef unsigned char u8;
typedef unsigned short u16;

constexpr int VECTORS = INNER / 8, OWN = (VECTORS + THREADS - 1) / THREADS, WARPS = THREADS / 32;
static_assert(!GROUP || (!EXACT && GROUP == 128 && INNER % GROUP == 0), "half a warp has a group");
static_assert(INNER % 8 == 0 && WARPS * 32 == THREADS && WARPS <= 32, "vectors of eight");

DEVICE float to_float(u16 x) {
#if HALF
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
#else
    return __uint_as_float(u32(x) << 16);
#endif
}
DEVICE float low_half(u32 w) { return to_float(u16(w)); }
DEVICE float high_half(u32 w) { return to_float(u16(w >> 16)); }

// Of the block; `sums`: a place for every warp.
template <bool MAXIMUM>
DEVICE float over_block(float v, float* sums) {
#pragma unroll
    for (int i = 16; i > 0; i /= 2) {
        const float other = __shfl_xor_sync(~0u, v, i);
        v = MAXIMUM ? fmaxf(v, other) : v + other;
    }
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = v;
    __syncthreads();
    v = sums[0];
#pragma unroll
    for (int i = 1; i < WARPS; ++i) v = MAXIMUM ? fmaxf(v, sums[i]) : v + sums[i];
    return v;
}

DEVICE void launch_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// What two codes of e4m3 stand for.
DEVICE void from_e4m3(u32 codes, float& low, float& high) {
    asm("{.reg .b32 t; .reg .f16 a, b; cvt.rn.f16x2.e4m3x2 t, %2; mov.b32 {a, b}, t; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}"
        : "=f"(low), "=f"(high)
        : "h"(u16(codes)));
}

DEVICE float largest_of(u32 w) { return fmaxf(fabsf(low_half(w)), fabsf(high_half(w))); }

// Of values of at most `top`.
DEVICE void choose_scale(float top, float& scale, float& inverse) {
    if (CODE == 1 && EXACT) {  // top / scale is 128 to 256
        const u32 exponent = max(__float_as_uint(top) >> 23, 8u);
        scale = __uint_as_float(exponent - 7 << 23), inverse = __uint_as_float(261 - exponent << 23);
    } else {
        constexpr float most = CODE == 1 ? 448.0f : EXACT ? 32639.0f : 127.0f;
        scale = top / most, inverse = top > 0.0f ? most / top : 0.0f;
    }
}

// Codes of two values, the second in the upper byte; `less`: of EXACT, those of what is left.
DEVICE u32 code_of(float a, float b, u32& less) {
    if (!EXACT) return to_codes<CODE>(a, b);
    if (CODE == 1) {
        const u32 q = to_e4m3(a, b);
        float x, y;
        from_e4m3(q, x, y);
        less = to_e4m3((a - x) * 16.0f, (b - y) * 16.0f);
        return q;
    }
    const int x = __float2int_rn(a), y = __float2int_rn(b);
    less = (x & 255) | (y & 255) << 8;
    return ((x + 128) >> 8 & 255) | ((y + 128) >> 8 & 255) << 8;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    quantize_rows(const u16* x, const float* norm, u8* codes, float* scales, float eps, float given) {
    launch_next();
    __shared__ float squares[WARPS], largest[WARPS];
    float4 gains[NORM ? OWN : 1][2];  // a weight: no kernel's result
#pragma unroll
    for (int i = 0; i < (NORM ? OWN : 0); ++i) {
        const int at = i * THREADS + threadIdx.x;
        if (at >= VECTORS) break;
        gains[i][0] = __ldg(reinterpret_cast<const float4*>(norm) + 2 * at);
        gains[i][1] = __ldg(reinterpret_cast<const float4*>(norm) + 2 * at + 1);
    }
    wait_for_previous();
    const long long row = blockIdx.x;
    const uint4* from = reinterpret_cast<const uint4*>(x + row * X_ROW);
    uint4 v[OWN];
    u32* words = reinterpret_cast<u32*>(v);
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        const int at = i * THREADS + threadIdx.x;
        v[i] = at < VECTORS ? from[at] : make_uint4(0, 0, 0, 0);
    }
    if (NORM) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 4 * OWN; ++i) {
            const float a = low_half(words[i]), b = high_half(words[i]);
            sum += a * a + b * b;
        }
        const float scale = rsqrtf(over_block<false>(sum, squares) / INNER + eps);
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            const int at = i * THREADS + threadIdx.x;
            if (at >= VECTORS) break;
            const float4 low = gains[NORM ? i : 0][0], high = gains[NORM ? i : 0][1];
            const float g[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
            // Rounded as the norm's own result would be.
#pragma unroll
            for (int j = 0; j < 4; ++j)
                words[4 * i + j] = pack(low_half(words[4 * i + j]) * scale * g[2 * j],
                                        high_half(words[4 * i + j]) * scale * g[2 * j + 1]);
        }
    }
    float scale, inverse;
    if (!GROUP) {
        float top = 0.0f;
        if (EXACT || given == 0.0f) {
#pragma unroll
            for (int i = 0; i < 4 * OWN; ++i) top = fmaxf(top, largest_of(words[i]));
            top = over_block<true>(top, largest);
        }
        if (!EXACT && given != 0.0f) scale = given, inverse = 1.0f / given;
        else choose_scale(top, scale, inverse);
        if (threadIdx.x == 0) scales[row] = scale;
    }
    const long long first = EXACT ? row / 8 * 16 + row % 8 : row;
    uint2* to = reinterpret_cast<uint2*>(codes + first * INNER);
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        const int at = i * THREADS + threadIdx.x;
        if (GROUP) {
            float top = 0.0f;
#pragma unroll
            for (int j = 0; j < 4; ++j) top = fmaxf(top, largest_of(words[4 * i + j]));
#pragma unroll
            for (int j = 8; j > 0; j /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, j));
            choose_scale(top, scale, inverse);
            if (at < VECTORS && at % 16 == 0) scales[at / 16 * (long long)X_SCALES + row] = scale;
        }
        if (at >= VECTORS) break;
        u32 q[4], less[4];
#pragma unroll
        for (int j = 0; j < 4; ++j)
            q[j] = code_of(low_half(words[4 * i + j]) * inverse, high_half(words[4 * i + j]) * inverse, less[j]);
        to[at] = make_uint2(q[0] | q[1] << 16, q[2] | q[3] << 16);
        if (EXACT) to[at + INNER] = make_uint2(less[0] | less[1] << 16, less[2] | less[3] << 16);
    }
}
