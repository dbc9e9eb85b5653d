// x of packed.cu, after whose layout of shared memory and packed_unit.cuh this is included: to shared memory, times the
// norm's gain and what codes need; its sums over groups, and of squares over units of 128 columns.
#pragma once

DEVICE void copy_chunk(u32 target, const void* source) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
}
DEVICE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
DEVICE void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// 8 columns of a unit: the `chunk`-th.
DEVICE bool is_high(int chunk) { return chunk % 8 >= 4; }
// The norm's gains of 8 columns; then with what codes need.
DEVICE void load_gains(float (&gains)[8], const float* at) {
    const float4 a = __ldg((const float4*)at), b = __ldg((const float4*)at + 1);
    gains[0] = a.x, gains[1] = a.y, gains[2] = a.z, gains[3] = a.w;
    gains[4] = b.x, gains[5] = b.y, gains[6] = b.z, gains[7] = b.w;
}
DEVICE void scale_gains(float (&gains)[8], bool high) {
#pragma unroll
    for (int e = 0; e < 8; ++e) gains[e] *= low_half(high ? HIGH_FACTOR : LOW_FACTOR);
}
DEVICE void widen(float (&v)[8], const uint4& w) {
    const u32 words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) v[2 * i] = low_half(words[i]), v[2 * i + 1] = high_half(words[i]);
}
DEVICE uint4 gained(const float (&v)[8], const float (&gains)[8]) {
    return make_uint4(pack_bf16(v[0] * gains[0], v[1] * gains[1]), pack_bf16(v[2] * gains[2], v[3] * gains[3]),
                      pack_bf16(v[4] * gains[4], v[5] * gains[5]), pack_bf16(v[6] * gains[6], v[7] * gains[7]));
}
DEVICE uint4 scaled(const uint4& w, bool high) {
    const u32 factor = high ? HIGH_FACTOR : LOW_FACTOR;
    return make_uint4(times(w.x, factor), times(w.y, factor), times(w.z, factor), times(w.w, factor));
}
DEVICE void put_uint4(u32 at, const uint4& w) { put_4(at, w.x, w.y, w.z, w.w); }

// Of one token: a thread has 8 columns at a time.
DEVICE void prepare_one(const Block& block, const u16* x, const float* norm) {
    constexpr int CHUNKS = OWN * 16, TURNS = (CHUNKS + THREADS - 1) / THREADS;
    const int columns = block.rank * OWN * UNIT, thread = threadIdx.x;
    float gains[NORM ? TURNS : 1][8];
#pragma unroll
    for (int j = 0; j < TURNS; ++j)
        if (int i = j * THREADS + thread; NORM && i < CHUNKS) load_gains(gains[j], norm + columns + i * 8);
    wait_for_previous();
    uint4 w[TURNS];
#pragma unroll
    for (int j = 0; j < TURNS; ++j) {
        const int i = j * THREADS + thread;
        w[j] = i < CHUNKS ? *(const uint4*)(x + columns + i * 8) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int j = 0; j < TURNS; ++j) {
        const int i = j * THREADS + thread;
        float v[8], square = 0.0f, sum = 0.0f;
        if (NORM) {
            scale_gains(gains[j], is_high(i));
            widen(v, w[j]);
#pragma unroll
            for (int e = 0; e < 8; ++e) square += v[e] * v[e];
            w[j] = gained(v, gains[j]);
        } else {
            w[j] = scaled(w[j], is_high(i));
        }
        if (X_SUMS) {
            widen(v, w[j]);
#pragma unroll
            for (int e = 0; e < 8; ++e) sum += v[e];
            if (CODE == 0 && is_high(i)) sum *= 16.0f;
        }
#pragma unroll
        for (int lanes = 1; lanes < 16; lanes *= 2) {
            if (X_SUMS && lanes * SETS < 16) sum += __shfl_xor_sync(~0u, sum, lanes);
            if (NORM) square += __shfl_xor_sync(~0u, square, lanes);
        }
        if (i >= CHUNKS) continue;
        put_uint4(block.base + X_AT + i * 16, w[j]);
        // Two factors: float32 has no 2^-133 but a subnormal one.
        if (X_SUMS && i * SETS % 16 == 0)
            put(block.base + X_SUMS_AT + i * SETS / 16 * TOKEN_BYTES, sum * 0x1p-64f * (1.0f / BACK));
        if (NORM && i % 16 == 0) put(block.base + X_SQUARES_AT + i / 16 * TOKEN_BYTES, square);
    }
}

// Of more: a warp has whole units, whose sums and squares the tensor cores make.
DEVICE void prepare(const Block& block, const u16* x, const float* norm, int tokens) {
    constexpr int TURNS = (OWN + WARPS - 1) / WARPS;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, chunk = lane % 16, g = lane / 4, q = lane % 4;
    const int columns = block.rank * OWN * UNIT + chunk * 8;
    const u32 to = block.base + X_AT + chunk * 16;
    float gains[NORM ? TURNS : 1][8];
#pragma unroll
    for (int j = 0; j < TURNS; ++j)
        if (int u = j * WARPS + warp; NORM && u < OWN) load_gains(gains[j], norm + columns + u * UNIT);
    wait_for_previous();
#pragma unroll
    for (int j = 0; j < TURNS; ++j) {
        if (int u = j * WARPS + warp; u < OWN)
            for (int row = lane / 16; row < TOKENS; row += 2) {
                const u32 at = to + row * X_STRIDE + u * (UNIT * 2);
                if (row < tokens)
                    copy_chunk(at, x + (long long)row * X_ROW + columns + u * UNIT);
                else
                    put_4(at, 0, 0, 0, 0);
            }
        copies_commit();
    }
#pragma unroll
    for (int j = 0; j < TURNS; ++j) {
        const int u = j * WARPS + warp;
        if (u >= OWN) break;
        if (j == TURNS - 1)
            copies_wait<0>();
        else
            copies_wait<1>();
        __syncwarp();
        u32 rows[TILES];
#pragma unroll
        for (int t = 0; t < TILES; ++t)
            rows[t] = block.base + X_AT + u * (UNIT * 2) + lane / 8 * 16 +
                      (t * 8 + (TOKENS < 8 ? min(lane % 8, TOKENS - 1) : lane % 8)) * X_STRIDE;
        if (NORM) scale_gains(gains[j], is_high(chunk));
        if (NORM) {  // x times itself: squares are on the diagonal
            float d[2][TILES][4] = {};
#pragma unroll
            for (int quarter = 0; quarter < 4; ++quarter) {
                u32 b[TILES][4];
#pragma unroll
                for (int t = 0; t < TILES; ++t) load_matrices(b[t], rows[t] + quarter * 64);
#pragma unroll
                for (int step = 0; step < 2; ++step)
#pragma unroll
                    for (int t = 0; t < TILES; ++t) {
                        const u32 a[4] = {b[0][2 * step], b[TILES - 1][2 * step], b[0][2 * step + 1],
                                          b[TILES - 1][2 * step + 1]};
                        product(d[step][t], a, b[t][2 * step], b[t][2 * step + 1]);
                    }
            }
#pragma unroll
            for (int t = 0; t < TILES; ++t) {
                const float even = d[0][t][2 * t] + d[1][t][2 * t], odd = d[0][t][2 * t + 1] + d[1][t][2 * t + 1];
                if (q == g / 2)
                    put(block.base + X_SQUARES_AT + u * TOKEN_BYTES + (t * 8 + g) * 4, g % 2 ? odd : even);
            }
            __syncwarp();
        }
#pragma unroll
        for (int row = lane / 16; row < TOKENS; row += 2) {
            const u32 at = to + row * X_STRIDE + u * (UNIT * 2);
            const uint4 w = get_4(at);
            if (NORM) {
                float v[8];
                widen(v, w);
                put_uint4(at, gained(v, gains[j]));
            } else {
                put_uint4(at, scaled(w, is_high(chunk)));
            }
        }
        if (!X_SUMS) continue;
        __syncwarp();
        float d[2][TILES][4] = {};
#pragma unroll
        for (int quarter = 0; quarter < 4; ++quarter) {
            constexpr int SPAN = GROUP == 16 ? 1 : GROUP > 0 ? GROUP / 32 : 4;  // quarters of a scale, or of two
            const u32 one = CODE == 0 && quarter % 2 == 1 ? 0x00100010 : 0x00010001, a[4] = {one, one, one, one};
#pragma unroll
            for (int t = 0; t < TILES; ++t) {
                u32 b[4];
                load_matrices(b, rows[t] + quarter * 64);
                product(d[0][t], a, b[0], b[1]);
                product(d[1][t], a, b[2], b[3]);
                if (quarter % SPAN != SPAN - 1) continue;
                const u32 at = block.base + X_SUMS_AT + u * SETS * TOKEN_BYTES + t * 32 + q * 8;
                if (g == 0 && GROUP == 16) {
#pragma unroll
                    for (int step = 0; step < 2; ++step) {
                        const u32 of_step = at + (2 * quarter + step) * TOKEN_BYTES;
                        put(of_step, d[step][t][0]), put(of_step + 4, d[step][t][1]);
                    }
                } else if (g == 0) {
                    const u32 of_group = at + quarter / SPAN * TOKEN_BYTES;
                    put(of_group, d[0][t][0] + d[1][t][0]), put(of_group + 4, d[0][t][1] + d[1][t][1]);
                }
#pragma unroll
                for (int e = 0; e < 4; ++e) d[0][t][e] = d[1][t][e] = 0.0f;
            }
        }
    }
}

// Of each token, to all of the cluster.
DEVICE void add_squares(const Block& block) {
    const int lane = threadIdx.x % 32;
    for (int token = threadIdx.x / 32; token < TOKENS; token += WARPS) {
        float sum = 0.0f;
        for (int u = lane; u < OWN; u += 32) sum += get(block.base + X_SQUARES_AT + u * TOKEN_BYTES + token * 4);
#pragma unroll
        for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
        const u32 at = block.base + SQUARES_AT + block.rank * TOKEN_BYTES + token * 4;
        if (CLUSTER == 1 && lane == 0) put(at, sum);
        if (CLUSTER > 1 && lane < CLUSTER) send(sum, at, block.parts(), lane);
    }
}
