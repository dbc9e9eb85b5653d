// What follows the sums: those of other groups and blocks, scales of rows, bias, residual, activation. Part of
// hopper_wide.cu.
//
// Row `warp * 16 + lane / 4` of a group (and 8 on), token 8 j + 2 (lane % 4) + e is a thread's element 4 j + 2 h + e.
#pragma once

struct Operands {
    const u8* weight;
    int tokens;
    const float* bias;
    const u16* residual;
    u16* out;
};

// ---- Results as the product's own would be, rounded, where they can be read token by token ----

// Tokens of 64 rows, in pieces of 16 bytes whose order spreads reads and writes over all banks.
DEVICE u32 piece_of(u32 at, int token, int piece) {
    return at + token * ROW_BYTES + ((piece ^ (token >> 1 & 3) ^ (token & 1) << 2) << 4);
}

// Two 8 by 8 matrices, each to eight places of 16 bytes, of which lane 8 i + r names row r of the i-th; a lane has a
// column's two values of each.
DEVICE void put_transposed(u32 at, u32 a, u32 b) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(at), "r"(a), "r"(b) : "memory");
}
// Of an 8 by 8 matrix, of which a lane has two values of row lane / 4: two of column lane / 4.
DEVICE u32 transposed(u32 x) {
    u32 y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

// What a warp's 16 rows of a strip have besides their sums.
struct Rows {
    float factor[2], add[2];
    const u16* residual;  // of this lane: two rows of token lane / 4
    int token;            // the first of the sums

    DEVICE Rows(const Strip& strip, int warp, int token, const Operands& o) : token(token) {
        const int lane = threadIdx.x % 32, panel = strip.of_warp(warp);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = lane / 4 + 8 * h;
            factor[h] = SUMMED, add[h] = 0.0f;
            if (GROUP == 0 || BYTE_SCALES == 1)
                factor[h] *= __ldg((const float*)(o.weight + panel * PANEL_BYTES + CODE_BYTES) + row);
            if (BIAS) add[h] = __ldg(o.bias + panel * 16 + row);
        }
        if (RESIDUAL) residual = o.residual + (long long)(token + lane / 4) * R_ROW + panel * 16 + lane % 4 * 2;
    }
    // Of the j-th eight tokens of those below `tokens`: of either eight rows two of token lane / 4.
    DEVICE void load(u32 (&r)[2], int j, int tokens) const {
        r[0] = r[1] = 0;
        if (!RESIDUAL || token + 8 * j + int(threadIdx.x) % 32 / 4 >= tokens) return;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const u16* from = residual + (long long)(8 * j) * R_ROW + 8 * h;
            r[h] = R_ROW % 2 == 0 ? *(const u32*)from : from[0] | u32(from[1]) << 16;
        }
    }
    // Rounded: of either eight rows tokens 2 (lane % 4) and the next; in `w` before: what `load` gave.
    DEVICE void finish(u32 (&w)[2], const float (&sum)[4]) const {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float low = sum[2 * h] * factor[h] + add[h], high = sum[2 * h + 1] * factor[h] + add[h];
            if (RESIDUAL) {
                const u32 r = transposed(w[h]);
                low += low_half(r), high += high_half(r);
            }
            w[h] = pack_bf16(low, high);
        }
    }
};

// A warp's rows of the j-th eight tokens.
DEVICE void put_eight(u32 at, int warp, int j, const u32 (&w)[2]) {
    const int lane = threadIdx.x % 32;
    put_transposed(piece_of(at, 8 * j + lane % 8, 2 * warp + lane / 8 % 2), w[0], w[1]);
}

// From there to global memory, by some threads, of which this is the `thread`-th: so many tokens from `token` on.
template <int OF_THREADS>
DEVICE void write_strip(u32 at, const Strip& strip, int token, int count, const Operands& o, int thread) {
    constexpr int PIECES = 2 * STRIP;  // of a token's results
    const int piece = thread % PIECES, n = strip.panel * 16 + 8 * piece;
    if (piece / 2 >= strip.panels) return;
#pragma unroll 2
    for (int i = thread / PIECES; i < count; i += OF_THREADS / PIECES) {
        const int m = token + i;
        if (m >= o.tokens) break;
        uint4 y = get_4(piece_of(at, i, piece));
        if (GATED) {
            const uint4 up = get_4(piece_of(at, i, 4 + piece));
            u32 w[4] = {y.x, y.y, y.z, y.w};
            const u32 u[4] = {up.x, up.y, up.z, up.w};
#pragma unroll
            for (int k = 0; k < 4; ++k)
                w[k] = pack_bf16(activate(low_half(w[k])) * low_half(u[k]), activate(high_half(w[k])) * high_half(u[k]));
            y = make_uint4(w[0], w[1], w[2], w[3]);
        }
        *(uint4*)(o.out + (long long)m * RESULTS + n) = y;
    }
}

// Whole sums of a warp, of all tokens or half of them.
template <int N>
DEVICE void put_strip(u32 at, const Strip& strip, int warp, const float (&d)[N], const Operands& o) {
    const Rows rows(strip, warp, strip.first_token(), o);
#pragma unroll
    for (int j = 0; j < N / 4; ++j) {
        const float sum[4] = {d[4 * j], d[4 * j + 1], d[4 * j + 2], d[4 * j + 3]};
        u32 w[2];
        rows.load(w, j, o.tokens);
        rows.finish(w, sum);
        put_eight(at, warp, j, w);
    }
}

// ---- Sums of which several groups or blocks have parts ----

// Where they lie, 16 bytes of each thread for eight tokens: what the splits of a block have, and, behind, what the
// cluster's blocks have of the tokens that are this block's.
struct Parts {
    u32 base;
    int row_group;
    DEVICE u32 of_split(int split, int j) const { return place((row_group * SPLITS + split) * EIGHTS + j); }
    DEVICE u32 of_block(int rank, int j) const {
        return place((SPLITS > 1 ? GROUPS * EIGHTS : 0) + (row_group * CLUSTER + rank) * (EIGHTS / CLUSTER) + j);
    }

  private:
    DEVICE u32 place(int i) const { return base + i * PART + threadIdx.x % 128 * 16; }
};
DEVICE void add_4(float (&sum)[4], u32 at) {
    const uint4 v = get_4(at);
    sum[0] += __uint_as_float(v.x), sum[1] += __uint_as_float(v.y);
    sum[2] += __uint_as_float(v.z), sum[3] += __uint_as_float(v.w);
}
DEVICE void put_4(u32 at, const float (&v)[4]) {
    put_4(at, __float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3]));
}

// Eight tokens' sums of this block to the one of the cluster that finishes them.
DEVICE void pass_on(const Shared& shared, const Parts& parts, int rank, int to, int j, const float (&v)[4]) {
    const u32 at = parts.of_block(rank, j);
    if (to == rank) put_4(at, v);
    else send_4(v, place_of(at, to), place_of(shared.sent(parts.row_group), to));
}

// Those of a group, `d`, and what the others have of the same rows: each finishes some tokens.
template <int N>
DEVICE void share(const Shared& shared, const Strip& strip, int group, const float (&d)[N], const Operands& o) {
    constexpr int OF_BLOCK = N / 4 / CLUSTER, MOST = (OF_BLOCK + SPLITS - 1) / SPLITS;  // eights of tokens
    const int rank = blockIdx.x % CLUSTER, split = group / ROW_GROUPS, warp = threadIdx.x / 32 % 4;
    const Parts parts{shared.base, group % ROW_GROUPS};
    const int begin = split * OF_BLOCK / SPLITS, end = (split + 1) * OF_BLOCK / SPLITS;
    const int token = strip.first_token() + 8 * (rank * OF_BLOCK + begin);
    const Rows rows(strip, warp, token, o);
    u32 w[MOST][2];
#pragma unroll
    for (int i = 0; i < MOST; ++i) rows.load(w[i], i, begin + i < end ? o.tokens : 0);
    if (SPLITS > 1) {
#pragma unroll
        for (int j = 0; j < N / 4; ++j) put_4(parts.of_split(split, j), {d[4 * j], d[4 * j + 1], d[4 * j + 2], d[4 * j + 3]});
        named_sync(own(parts.row_group), SPLITS * 128);
    }
    if (CLUSTER > 1) {
        cluster_wait();  // others have read their x, too
        if (SPLITS == 1) {
#pragma unroll
            for (int j = 0; j < N / 4; ++j)
                pass_on(shared, parts, rank, j / OF_BLOCK, j % OF_BLOCK, {d[4 * j], d[4 * j + 1], d[4 * j + 2], d[4 * j + 3]});
        } else {
#pragma unroll
            for (int b = 1; b <= CLUSTER; ++b) {
                const int to = (rank + b) % CLUSTER;  // its own last
                for (int j = begin; j < end; ++j) {
                    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
                    for (int s = 0; s < SPLITS; ++s) add_4(sum, parts.of_split(s, to * OF_BLOCK + j));
                    pass_on(shared, parts, rank, to, j, sum);
                }
            }
        }
        barrier_wait(shared.sent(parts.row_group), 0);
    }
#pragma unroll
    for (int i = 0; i < MOST; ++i) {
        if (begin + i >= end) break;
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int p = 0; p < (CLUSTER > 1 ? CLUSTER : SPLITS); ++p)
            add_4(sum, CLUSTER > 1 ? parts.of_block(p, begin + i) : parts.of_split(p, begin + i));
        rows.finish(w[i], sum);
    }
    // What this group alone has read makes room.
    named_sync(alone(group), 128);
    const u32 at = (CLUSTER > 1 ? parts.of_block(rank, begin) : parts.of_split(split, begin)) - threadIdx.x % 128 * 16;
#pragma unroll
    for (int i = 0; i < MOST; ++i)
        if (begin + i < end) put_eight(at, warp, i, w[i]);
    named_sync(alone(group), 128);
    write_strip<128>(at, strip, token, 8 * (end - begin), o, threadIdx.x % 128);
}
