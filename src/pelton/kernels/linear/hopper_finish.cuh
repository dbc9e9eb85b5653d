// What follows the sums of hopper_products.cu and hopper_blocks.cu, whose constants these are: scales, bias, activation,
// residual, and the result's rows: elements, or codes of one scale where RESULT_CODE is not 0 (e4m3 1, int8 2).
#pragma once
#include "codes.cuh"
#include "shared.cuh"

DEVICE float low_half(u32 w) {
#if HALF
    float y;
    asm("{.reg .f16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, a;}" : "=f"(y) : "r"(w));
    return y;
#else
    return __uint_as_float(w << 16);
#endif
}
DEVICE float high_half(u32 w) {
#if HALF
    return low_half(w >> 16);
#else
    return __uint_as_float(w & 0xffff0000);
#endif
}

DEVICE float reciprocal(float v) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(v));
    return y;
}

// As activation.cuh's, but faster: here every thread has dozens.
DEVICE float activate(float v) {
    if (GATED == 1) return v * reciprocal(1.0f + exp2_fast(v * -1.4426950408889634f));
    if (GATED == 2) return 0.5f * v * (1.0f + erff(v * 0.7071067811865476f));
    if (GATED == 3) {
        const float u = 0.7978845608028654f * (v + 0.044715f * v * v * v);
        return 0.5f * v * (2.0f - 2.0f / (__expf(2.0f * u) + 1.0f));
    }
    return fmaxf(v, 0.0f);
}

// Eights of results of a row and a warp group. Gated, a sixteen of sums is one, else two.
constexpr int EIGHTS_OF_SIXTEEN = 2 / HALVES, EIGHTS = SIXTEENS * EIGHTS_OF_SIXTEEN;

// Of one item and thread: of each sixteen by sixteen, sum 4 o + 2 h + e is of row lane / 4 + 8 h of x, row 8 o +
// 2 (lane % 4) + e of the weight. Of results, words of two: results 2 (lane % 4) of an eight; codes are in the low half.
struct Finish {
    u32 vectors;  // scales in shared memory, and behind them what is added
    int tokens;
    const u16* residual;
    u16* out;  // or codes
    float result_scale, x_scale;  // of RESULT_CODE; of STATIC
    int row, n;  // the warp's first row of x; the warp group's first result
    float x_scales[M_TILES][2];

    DEVICE int token(int m, int h) const {
        const int lane = threadIdx.x % 32, first = row + 64 * m;
        return EXACT ? first / 2 + lane / 4 : first + lane / 4 + 8 * h;
    }

    DEVICE void begin(int group, int tile, int x_row, const float* scales, const float* bias) {
        row = x_row + (group / WG_N) * M_TILES * 64 + threadIdx.x / 32 % 4 * 16;
        n = tile * TILE + group % WG_N * (COLUMNS / HALVES);
        if (CODE == 0 && !BIAS) return;
        named_sync(2 + group, 128);  // those of the item before are no longer needed
        for (int i = threadIdx.x % 128; i < COLUMNS; i += 128) {
            const int result = n + (GATED ? i / 16 * 8 + i % 8 : i);
            const int at = result + (GATED && i & 8 ? RESULTS : 0);
            const float scale = CODE && result < RESULTS ? __ldg(scales + at) : 1.0f;
            const float add = BIAS && result < RESULTS ? __ldg(bias + at) : 0.0f;
            put(vectors + 4 * i, scale);
            if (BIAS) put(vectors + VECTOR + 4 * i, add);
        }
    }
    DEVICE void begin_x(const float* scales) {
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h)
                x_scales[m][h] = STATIC ? x_scale : CODE && token(m, h) < tokens ? __ldcg(scales + token(m, h)) : 1.0f;
    }
    DEVICE void sums_are_there(int group) const {
        if (CODE || BIAS) named_sync(2 + group, 128);
    }

    // From the sums `v` of sixteen `g`: the words of its eights, of rows h; `r`: the residual's.
    DEVICE void round(u32 (&w)[EIGHTS_OF_SIXTEEN][2], const float (&v)[8], const u32 (&r)[EIGHTS_OF_SIXTEEN][2], int g,
                      float first_scale, float second_scale) const {
        const float inverse = RESULT_CODE ? 1.0f / result_scale : 1.0f;
        float2 scale[2], add[2];
#pragma unroll
        for (int o = 0; o < 2; ++o) {
            const u32 at = vectors + 4 * (16 * g + 8 * o + threadIdx.x % 4 * 2);
            scale[o] = CODE ? get_2(at) : make_float2(0.0f, 0.0f);
            add[o] = BIAS ? get_2(at + VECTOR) : make_float2(0.0f, 0.0f);
        }
#pragma unroll
        for (int h = 0; h < (EXACT ? 1 : 2); ++h) {
            const float x_scale = h ? second_scale : first_scale;
            float y[2][2];
#pragma unroll
            for (int o = 0; o < 2; ++o)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float sum = v[4 * o + 2 * h + e];
                    if (EXACT) sum = CODE == 1 ? sum + v[4 * o + 2 + e] * 0.0625f : sum * 256.0f + v[4 * o + 2 + e];
                    y[o][e] = CODE ? sum * ((e ? scale[o].y : scale[o].x) * x_scale) : sum;
                    if (BIAS) y[o][e] += e ? add[o].y : add[o].x;
                }
            if (GATED) {
                // Rounded as the product's own result would be.
                const u32 gate = pack(y[0][0], y[0][1]), up = pack(y[1][0], y[1][1]);
                y[0][0] = activate(low_half(gate)) * low_half(up), y[0][1] = activate(high_half(gate)) * high_half(up);
            }
#pragma unroll
            for (int o = 0; o < EIGHTS_OF_SIXTEEN; ++o) {
                if (RESIDUAL) y[o][0] += low_half(r[o][h]), y[o][1] += high_half(r[o][h]);
                w[o][h] = pack(y[o][0], y[o][1]);
                // Rounded to elements first, as another kernel would read them.
                if (RESULT_CODE)
                    w[o][h] = to_codes<RESULT_CODE>(low_half(w[o][h]) * inverse, high_half(w[o][h]) * inverse);
            }
        }
    }

    // ---- One sixteen: lanes have a word each ----

    DEVICE int column(int g, int o) const { return n + 8 * (g * EIGHTS_OF_SIXTEEN + o) + threadIdx.x % 4 * 2; }
    DEVICE bool inside(int m, int g, int o, int h) const { return token(m, h) < tokens && column(g, o) < RESULTS; }

    DEVICE void load(u32 (&r)[EIGHTS_OF_SIXTEEN][2], int m, int g) const {
        if (!RESIDUAL) return;
#pragma unroll
        for (int h = 0; h < (EXACT ? 1 : 2); ++h)
#pragma unroll
            for (int o = 0; o < EIGHTS_OF_SIXTEEN; ++o)
                r[o][h] = inside(m, g, o, h)
                              ? *reinterpret_cast<const u32*>(residual + (long long)token(m, h) * R_ROW + column(g, o))
                              : 0;
    }
    DEVICE void store(const u32 (&w)[EIGHTS_OF_SIXTEEN][2], int m, int g) const {
#pragma unroll
        for (int h = 0; h < (EXACT ? 1 : 2); ++h)
#pragma unroll
            for (int o = 0; o < EIGHTS_OF_SIXTEEN; ++o)
                if (inside(m, g, o, h)) {
                    const long long at = (long long)token(m, h) * RESULTS + column(g, o);
                    if (RESULT_CODE) *reinterpret_cast<u16*>(reinterpret_cast<u8*>(out) + at) = w[o][h];
                    else *reinterpret_cast<u32*>(out + at) = w[o][h];
                }
    }

    // ---- Four eights from `first` on: each lane has one, 16 bytes; transposed, words of all ----

    DEVICE bool own(int m, int h, int first, int& at) const {
        const int eight = first + threadIdx.x % 4;
        at = n + 8 * eight;
        return eight < EIGHTS && at < RESULTS && token(m, h) < tokens;
    }
    DEVICE void load_fours(u32 (&r)[4], int m, int h, int first) const {
        r[0] = r[1] = r[2] = r[3] = 0;
        int at;
        if (!RESIDUAL || !own(m, h, first, at)) return;
        const uint4 from = *reinterpret_cast<const uint4*>(residual + (long long)token(m, h) * R_ROW + at);
        r[0] = from.x, r[1] = from.y, r[2] = from.z, r[3] = from.w;
    }
    DEVICE void store_fours(u32 (&w)[4], int m, int h, int first) const {
        transpose(w);
        int at;
        if (!own(m, h, first, at)) return;
        const long long from = (long long)token(m, h) * RESULTS + at;
        if (RESULT_CODE)
            *reinterpret_cast<uint2*>(reinterpret_cast<u8*>(out) + from) =
                make_uint2(w[0] | w[1] << 16, w[2] | w[3] << 16);
        else *reinterpret_cast<uint4*>(out + from) = make_uint4(w[0], w[1], w[2], w[3]);
    }

    // All results of the sums `value(m, i)`.
    template <class Value>
    DEVICE void all(Value value) const {
        constexpr int ROWS_OF_SUM = EXACT ? 1 : 2, LOADED = 8;  // eights whose residuals are under way
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int begin = 0; begin < EIGHTS; begin += LOADED) {
                u32 r[LOADED / 4][2][4];
#pragma unroll
                for (int f = 0; f < LOADED / 4; ++f)
#pragma unroll
                    for (int h = 0; h < ROWS_OF_SUM; ++h) load_fours(r[f][h], m, h, begin + 4 * f);
#pragma unroll
                for (int f = 0; f < LOADED / 4; ++f) {
                    const int first = begin + 4 * f;
                    if (first >= EIGHTS) break;
                    u32 w[2][4] = {};
                    if (RESIDUAL)
#pragma unroll
                        for (int h = 0; h < ROWS_OF_SUM; ++h) transpose(r[f][h]);
#pragma unroll
                    for (int i = 0; i < 4; i += EIGHTS_OF_SIXTEEN) {
                        const int g = (first + i) / EIGHTS_OF_SIXTEEN;
                        if (g >= SIXTEENS) break;
                        float v[8];
                        u32 mine[EIGHTS_OF_SIXTEEN][2], add[EIGHTS_OF_SIXTEEN][2];
#pragma unroll
                        for (int j = 0; j < 8; ++j) v[j] = value(m, 8 * g + j);
#pragma unroll
                        for (int o = 0; o < EIGHTS_OF_SIXTEEN; ++o)
#pragma unroll
                            for (int h = 0; h < 2; ++h) add[o][h] = r[f][EXACT ? 0 : h][i + o];
                        round(mine, v, add, g, x_scales[m][0], x_scales[m][1]);
#pragma unroll
                        for (int o = 0; o < EIGHTS_OF_SIXTEEN; ++o)
#pragma unroll
                            for (int h = 0; h < ROWS_OF_SUM; ++h) w[h][i + o] = mine[o][h];
                    }
#pragma unroll
                    for (int h = 0; h < ROWS_OF_SUM; ++h) store_fours(w[h], m, h, first);
                }
            }
    }
};
