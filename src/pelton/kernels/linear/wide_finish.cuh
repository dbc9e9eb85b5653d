// What follows the sums: scales of rows, bias, activation, residual. Part of hopper_wide.cu.
#pragma once

// Row `warp * 16 + lane / 4` (and 8 on), token 8 j + 2 (lane % 4) + e is element 4 j + 2 h + e. A token's rows follow
// one another, in an order that spreads a warp's over all banks.
DEVICE void put_sums(u32 at, int warp, const float (&d)[VALUES], bool half) {
    const int q = threadIdx.x % 4, g = threadIdx.x % 32 / 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const u32 row = at + 4 * ((warp * 16 + 8 * h + g) ^ (q << 3)) + q * (8 * ROWS) + (half ? first_of_half() * 4 * ROWS : 0);
#pragma unroll
        for (int j = 0; j < TOKENS / 8; ++j) {
            if (HALF_STRIP && half && j >= TOKENS / 16) break;
#pragma unroll
            for (int e = 0; e < 2; ++e) put(row + (8 * j + e) * (4 * ROWS), d[4 * j + 2 * h + e]);
        }
    }
}

// Four rows' sums of a token: of all splits and blocks.
DEVICE float4 sum_of(const u32 (&places)[CLUSTER], int token, int row) {
    const u32 offset = 4 * (token * ROWS + (row ^ (token / 2 % 4 << 3)));
    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int b = 0; b < CLUSTER; ++b)
#pragma unroll
        for (int s = 0; s < SPLITS; ++s) {
            const float4 v = load_sums(places[b] + s * (ROWS * TOKENS * 4) + offset);
            sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
        }
    return sum;
}

struct Operands {
    const u8* weight;
    int tokens;
    const float* bias;
    const u16* residual;
    u16* out;
};

// Row scales and bias of four rows from row n of the weight on.
DEVICE void scale_and_add(float (&v)[4], float4 sum, const Operands& o, int n) {
    v[0] = sum.x, v[1] = sum.y, v[2] = sum.z, v[3] = sum.w;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (SUMMED != 1.0f) v[i] *= SUMMED;
        if (GROUP == 0 || BYTE_SCALES == 1) v[i] *= __ldg((const float*)(o.weight + n / 16 * PANEL_BYTES + CODE_BYTES) + n % 16 + i);
        if (BIAS) v[i] += __ldg(o.bias + n + i);
    }
}

// A round's results, of this block's tokens.
DEVICE void finish(u32 sums, const Operands& o, int round) {
    u32 places[CLUSTER];
#pragma unroll
    for (int b = 0; b < CLUSTER; ++b) places[b] = CLUSTER > 1 ? place_of(sums, b) : sums;
    constexpr int QUADS = ROUND * 4, PART = TOKENS / CLUSTER, ALL = PART * QUADS, HALF_SUMS = GATED ? 2 : 1;
    constexpr int AT_ONCE = CLUSTER > 1 && ALL >= 4 * THREADS && GROUPS < 4 ? 4 : ALL >= 2 * THREADS ? 2 : 1;
    const int begin = CLUSTER > 1 ? blockIdx.x % CLUSTER * PART : 0;
    for (int first = threadIdx.x; first < ALL; first += AT_ONCE * THREADS) {
        float4 sums_of_four[AT_ONCE][HALF_SUMS];
        uint2 added[AT_ONCE];
        int at[AT_ONCE], row_of[AT_ONCE];  // the first result, the token's row; less than 0: none
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) {
            const int i = min(first + j * THREADS, ALL - 1), token = begin + i / QUADS, quad = i % QUADS;
            const int group = quad / (4 * STRIP), in_strip = quad % (4 * STRIP) * 4, row = group * 64 + in_strip;
            const Strip strip(round, group);
            row_of[j] = blockIdx.y * TOKENS + token, at[j] = strip.panel * 16 + in_strip;
            const bool none = in_strip >= 16 * strip.panels || (strip.half && token / (TOKENS / 2) != blockIdx.x % 2);
            if (none || row_of[j] >= o.tokens || first + j * THREADS >= ALL) row_of[j] = -1;
#pragma unroll
            for (int h = 0; h < HALF_SUMS; ++h) sums_of_four[j][h] = sum_of(places, token, row + 32 * h);
            if (RESIDUAL && row_of[j] >= 0) {
                const u16* r = o.residual + (long long)row_of[j] * R_ROW + at[j];
                if (R_ROW % 4 == 0) added[j] = *(const uint2*)r;
                else added[j] = {r[0] | u32(r[1]) << 16, r[2] | u32(r[3]) << 16};
            }
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) {
            if (row_of[j] < 0) continue;
            const int n = at[j];
            float v[4], up[4];
            scale_and_add(v, sums_of_four[j][0], o, n);
            if (GATED) {
                scale_and_add(up, sums_of_four[j][HALF_SUMS - 1], o, RESULTS + n);
                // Rounded as the product's own result would be.
#pragma unroll
                for (int k = 0; k < 4; ++k) v[k] = activate(rounded(v[k])) * rounded(up[k]);
            }
            if (RESIDUAL) {
                const uint2 w = added[j];
                v[0] += low_half(w.x), v[1] += high_half(w.x), v[2] += low_half(w.y), v[3] += high_half(w.y);
            }
            *(uint2*)(o.out + (long long)row_of[j] * RESULTS + n) = {pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3])};
        }
    }
}

// ---- Whole sums of gate and up ----

// Of a group's strip, rounded: tokens of 64 rows, in pieces of 16 bytes whose order spreads reads and writes over all banks.
DEVICE u32 piece_of(u32 at, int token, int piece) {
    return at + token * ROW_BYTES + ((piece ^ (token >> 1 & 3) ^ (token & 1) << 2) << 4);
}

// Four 8 by 8 matrices, each to eight places of 16 bytes, of which lane 8 i + r names row r of the i-th; a lane has a
// column's two values of each.
DEVICE void put_transposed(u32 at, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a), "r"(b), "r"(c),
                 "r"(d)
                 : "memory");
}

// A warp's 16 rows, with row scales and bias, as the product's own result would be.
DEVICE void put_strip(u32 at, const Strip& strip, int warp, const float (&d)[VALUES], const Operands& o) {
    const int lane = threadIdx.x % 32, panel = strip.of_warp(warp);
    float factor[2], add[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int row = lane / 4 + 8 * h;
        factor[h] = SUMMED, add[h] = 0.0f;
        if (GROUP == 0 || BYTE_SCALES == 1) factor[h] *= __ldg((const float*)(o.weight + panel * PANEL_BYTES + CODE_BYTES) + row);
        if (BIAS) add[h] = __ldg(o.bias + panel * 16 + row);
    }
#pragma unroll
    for (int j = 0; j < TOKENS / 8; j += 2) {
        if (HALF_STRIP && strip.half && j >= TOKENS / 16) break;
        u32 w[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float* v = d + 4 * (j + i / 2) + 2 * (i % 2);
            w[i] = pack_bf16(v[0] * factor[i % 2] + add[i % 2], v[1] * factor[i % 2] + add[i % 2]);
        }
        const int token = (strip.half ? first_of_half() : 0) + 8 * (j + lane / 16) + lane % 8;
        put_transposed(piece_of(at, token, 2 * warp + lane / 8 % 2), w[0], w[1], w[2], w[3]);
    }
}

// By some threads, of which this is the `thread`-th.
template <int OF_THREADS>
DEVICE void finish_strip(u32 at, const Strip& strip, const Operands& o, int thread) {
    const int piece = thread % 4, n = strip.panel * 16 + 8 * piece;
    if (piece / 2 >= strip.panels) return;
    const int begin = strip.half ? first_of_half() : 0, count = strip.half ? TOKENS / 2 : TOKENS;
#pragma unroll 2
    for (int i = thread / 4; i < count; i += OF_THREADS / 4) {
        const int token = begin + i, m = blockIdx.y * TOKENS + token;
        if (m >= o.tokens) break;
        const uint4 gate = get_4(piece_of(at, token, piece)), up = get_4(piece_of(at, token, 4 + piece));
        const u32 g[4] = {gate.x, gate.y, gate.z, gate.w}, u[4] = {up.x, up.y, up.z, up.w};
        u32 y[4];
#pragma unroll
        for (int k = 0; k < 4; ++k)
            y[k] = pack_bf16(activate(low_half(g[k])) * low_half(u[k]), activate(high_half(g[k])) * high_half(u[k]));
        *(uint4*)(o.out + (long long)m * RESULTS + n) = make_uint4(y[0], y[1], y[2], y[3]);
    }
}
