// What products of a few tokens with whole rows of a matrix share (hopper_rows.cu, hopper_rows8.cu): blocks of
// compute capability 9.0 that take tiles of ROWS rows of the weight, every WORKERS-th, so that no block waits for
// another's sums. One warp copies weights, another x, through tensor maps into a ring of STAGES parts of a tile; the
// first begins before the kernel ahead in the stream has ended, since weights are no kernel's result. WARPS multiply, in SPLITS that share a tile's columns and parts that divide its rows; the sums of splits are added up in
// shared memory at a tile's end, in one order. The RMS norm before (NORM) costs no pass of its own: x is multiplied
// by the norm's weight as it is read, its squares are summed on the way, and the sums scaled at the end.
//
// Constants: RESULTS of INNER columns; TOKENS at most (8 or a multiple of 16); ROWS (a multiple of 16 for each
// part); BOXES of 128 bytes of each row of a part; STAGES; WARPS; SPLITS; WORKERS (blocks);
// GATED (0: no; else the activation: silu 1, gelu 2, gelu_tanh 3, relu 4; the weight has RESULTS gate rows, then
// as many up rows, and half of a tile is of either); NORM; BIAS, RESIDUAL (whether there is one); R_ROW (elements
// from row to row of the residual), HALF (float16 instead of bfloat16; not with NORM).
//
// Whoever includes this says before how many COLUMNS a box has, whether rows have scales (ROW_SCALES), whether x is
// codes (X_CODES), of what codes the result is (RESULT_CODE: e4m3 1, int8 2; 0: elements), and defines `copy_weights`
// and `copy_x`.
#pragma once
#include "hopper.cuh"
#include "activation.cuh"
#include "codes.cuh"

constexpr int THREADS = 32 * WARPS, ROW_BYTES = 128;
constexpr int OUT_ROWS = GATED ? ROWS / 2 : ROWS;
constexpr int OUT_ROWS_16 = (OUT_ROWS + 15) / 16 * 16;
constexpr int N_TILES = (RESULTS + OUT_ROWS - 1) / OUT_ROWS;
constexpr int STEPS = (INNER + COLUMNS * BOXES - 1) / (COLUMNS * BOXES);  // of a tile: filled places of the ring
constexpr int TILES = (N_TILES + WORKERS - 1) / WORKERS;  // of a block; those past the end are empty
constexpr int PARTS = WARPS / SPLITS, ROW_TILES = ROWS / 16 / PARTS, TOKEN_TILES = TOKENS / 8;
constexpr int X_BOXES = X_CODES ? 1 : COLUMNS / 64;  // of a box of the weight
constexpr u32 W_BOX = ROWS * ROW_BYTES, X_BOX = TOKENS * ROW_BYTES, STAGE_BYTES = BOXES * (W_BOX + X_BOXES * X_BOX);
constexpr u32 NORM_AT = STAGES * STAGE_BYTES, NORM_BYTES = NORM ? STEPS * BOXES * COLUMNS * 2 : 0;
constexpr u32 SCALES_AT = NORM_AT + NORM_BYTES, SCALES_BYTES = ROW_SCALES ? ROWS * 4 : 0;
// With one tile, the ring is no longer used when the sums are made.
constexpr u32 SUMS_BYTES = SPLITS * ROWS * TOKENS * 4, SUMS_AT = TILES == 1 ? 0 : SCALES_AT + SCALES_BYTES;
constexpr u32 SQUARES_AT = TILES == 1 ? SCALES_AT + SCALES_BYTES : SUMS_AT + SUMS_BYTES;
constexpr u32 BARRIERS_AT = SQUARES_AT + SPLITS * TOKENS * 4;
static_assert(!(NORM && HALF), "x times the norm's weight may be too large for float16");
static_assert(INNER % 4 == 0, "the norm's weight is read by fours");
static_assert(ROW_TILES * PARTS * 16 == ROWS && PARTS * SPLITS == WARPS, "rows of a warp");
static_assert(TILES > 1 || SUMS_BYTES <= STAGES * STAGE_BYTES, "the sums lie in the ring");

#if HALF
DEVICE float low_half(u32 w) {
    float y;
    asm("{.reg .f16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, a;}" : "=f"(y) : "r"(w));
    return y;
}
DEVICE float high_half(u32 w) { return low_half(w >> 16); }
#else
DEVICE float low_half(u32 w) { return __uint_as_float(w << 16); }
DEVICE float high_half(u32 w) { return __uint_as_float(w & 0xffff0000u); }
#endif
DEVICE float rounded(float x) { return low_half(pack(x, 0.0f)); }

DEVICE void launch_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

DEVICE void load_4(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}
DEVICE u32 times(u32 a, u32 b) {
    u32 y;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}
DEVICE u32 shared_word(u32 address) {
    u32 y;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(y) : "r"(address) : "memory");
    return y;
}
DEVICE float shared_float(u32 address) { return __uint_as_float(shared_word(address)); }
DEVICE void put_shared(u32 address, u32 value) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

DEVICE void put_shared_2(u32 address, u32 low, u32 high) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(low), "r"(high) : "memory");
}
DEVICE void put_shared_4(u32 address, const float (&d)[4]) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(d[0]), "f"(d[1]), "f"(d[2]), "f"(d[3])
                 : "memory");
}

struct Shared {
    u32 base;
    // Barriers of a place: its weights are there, its x is there, both have been read.
    DEVICE u32 full(u32 stage) const { return base + BARRIERS_AT + 24 * stage; }
    DEVICE u32 full_x(u32 stage) const { return full(stage) + 8; }
    DEVICE u32 empty(u32 stage) const { return full(stage) + 16; }
    DEVICE u32 weights(u32 stage) const { return base + stage * STAGE_BYTES; }
    DEVICE u32 x(u32 stage) const { return weights(stage) + BOXES * W_BOX; }
};

// The place in a ring.
struct Ring {
    u32 stage = 0, parity = 0;
    DEVICE void next() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// Of a part of a tile, what is to be copied to a place of the ring.
DEVICE void copy_weights(const Shared& shared, const TensorMap* map, u32 stage, int step);
DEVICE void copy_x(const Shared& shared, const TensorMap* map, u32 stage, int step);
constexpr int ALL_STEPS = TILES * STEPS, AHEAD = STAGES < ALL_STEPS ? STAGES : ALL_STEPS;

// By the warps that copy, before all threads meet; `readers`: warps that read a place of the ring.
DEVICE void begin(const Shared& shared, const TensorMap* weight, const TensorMap* x, u32 readers) {
    const u32 lane = threadIdx.x % 32;
    if (threadIdx.x / 32 > WARPS) {
        if (lane == 0) prefetch_map(x);
        return;
    }
    if (lane == 0) launch_next();
    for (u32 i = lane; i < STAGES; i += 32) {
        barrier_init(shared.full(i), 1);
        barrier_init(shared.full_x(i), 1);
        barrier_init(shared.empty(i), readers);
    }
    barrier_init_fence();
    __syncwarp();
    if (lane == 0)
        for (int i = 0; i < AHEAD; ++i) copy_weights(shared, weight, i, i);
}

// By the two warps that copy, afterwards: what has its own thread is not kept waiting.
DEVICE void copy(const Shared& shared, const TensorMap* weight, const TensorMap* x) {
    Ring ring;
    if (threadIdx.x == THREADS) {
        for (int step = AHEAD; step < ALL_STEPS; ++step, ring.next()) {
            barrier_wait(shared.empty(ring.stage), ring.parity);
            copy_weights(shared, weight, ring.stage, step);
        }
    } else if (threadIdx.x == THREADS + 32) {
        wait_for_previous();
        for (int step = 0; step < ALL_STEPS; ++step, ring.next()) {
            barrier_wait(shared.empty(ring.stage), ring.parity ^ 1);
            copy_x(shared, x, ring.stage, step);
        }
    }
}

// Where a value lies in a split's sums: as the tensor core's results do, 16 rows by 8 tokens after another.
DEVICE u32 place(int row, int token) {
    return ((row / 16 * TOKEN_TILES + token / 8) * 32 + row % 8 * 4 + token % 8 / 2) * 4 + row % 16 / 8 * 2 + token % 2;
}

// A thread's results of a tile: which they are, and what is to be added to them, read before the sums are there.
constexpr int CELLS = (OUT_ROWS_16 * TOKENS + THREADS - 1) / THREADS;
struct Cell {
    int index, row, m, n;  // in the order of `place`; of the tile; of the results
    bool there;
    DEVICE Cell(int c, int turn, int tokens) {
        // Element i % 4 of lane i / 4 % 32 of a result of the tensor core, as `place` says.
        index = threadIdx.x + c * THREADS;
        const int lane = index / 4 % 32, cell = index / 128;
        row = cell / TOKEN_TILES * 16 + lane / 4 + index % 4 / 2 * 8;
        m = cell % TOKEN_TILES * 8 + lane % 4 * 2 + index % 2;
        n = (blockIdx.x + turn * WORKERS) * OUT_ROWS + row;
        there = row < OUT_ROWS && m < tokens && n < RESULTS;
    }
};

struct Besides {
    unsigned short added[CELLS];
    float scales[(ROWS + THREADS - 1) / THREADS];  // of rows of the tile
};

DEVICE void load_scales(Besides& besides, int turn, const float* scales) {
#pragma unroll
    for (int i = 0; i < (ROWS + THREADS - 1) / THREADS; ++i) {
        const int row = threadIdx.x + i * THREADS, n = (blockIdx.x + turn * WORKERS) * OUT_ROWS + row % OUT_ROWS;
        besides.scales[i] = row < ROWS && n < RESULTS ? scales[row / OUT_ROWS * RESULTS + n] : 0.0f;
    }
}
DEVICE void put_scales(const Shared& shared, const Besides& besides, float x_scale) {
#pragma unroll
    for (int i = 0; i < (ROWS + THREADS - 1) / THREADS; ++i) {
        const int row = threadIdx.x + i * THREADS;
        if (row < ROWS) put_shared(shared.base + SCALES_AT + 4 * row, __float_as_uint(besides.scales[i] * x_scale));
    }
}

DEVICE void load_residual(Besides& besides, int turn, int tokens, const unsigned short* residual) {
    if (!RESIDUAL) return;
#pragma unroll
    for (int c = 0; c < CELLS; ++c) {
        const Cell cell(c, turn, tokens);
        besides.added[c] = cell.there ? residual[(long long)cell.m * R_ROW + cell.n] : 0;
    }
}

// A tile's sums of all splits, and what follows: scale, bias, activation, residual, codes. `turn`: which of the block's
// tiles it is.
DEVICE void finish(const Shared& shared, int turn, int tokens, float eps, const float* bias,
                   const Besides& besides, unsigned short* out, float result_scale) {
    const float inverse = RESULT_CODE ? 1.0f / result_scale : 1.0f;
#pragma unroll
    for (int c = 0; c < CELLS; ++c) {
        const Cell cell(c, turn, tokens);
        const int row = cell.row, m = cell.m, n = cell.n;
        if (!cell.there) continue;
        float v = 0.0f, up = 0.0f;
#pragma unroll
        for (int w = 0; w < SPLITS; ++w) {
            const u32 sums = shared.base + SUMS_AT + w * ROWS * TOKENS * 4;
            v += shared_float(sums + cell.index * 4);
            if (GATED) up += shared_float(sums + place(row + OUT_ROWS, m) * 4);
        }
        if (ROW_SCALES) {
            v *= shared_float(shared.base + SCALES_AT + 4 * row);
            if (GATED) up *= shared_float(shared.base + SCALES_AT + 4 * (row + OUT_ROWS));
        }
        if (NORM) {
            float squares = 0.0f;
#pragma unroll
            for (int w = 0; w < SPLITS; ++w) squares += shared_float(shared.base + SQUARES_AT + (w * TOKENS + m) * 4);
            const float scale = rsqrtf(squares / INNER + eps);
            v *= scale;
            up *= scale;
        }
        if (BIAS) v += bias[n];
        if (GATED) {
            if (BIAS) up += bias[RESULTS + n];
            // Rounded as the product's own result would be.
            v = activate(rounded(v)) * rounded(up);
        }
        if (RESIDUAL) v += low_half(besides.added[c]);
        const long long at = (long long)m * RESULTS + n;
        // Rounded to elements first, as another kernel would read them.
        if (RESULT_CODE) reinterpret_cast<unsigned char*>(out)[at] = to_codes<RESULT_CODE>(rounded(v) * inverse, 0.0f);
        else out[at] = pack(v, 0.0f);
    }
}

// A warp's own results of a tile, and where `counts` its sums of squares, for `finish`.
DEVICE void leave(const Shared& shared, const float (&d)[ROW_TILES][TOKEN_TILES][4],
                  const float (&squares)[TOKEN_TILES], bool counts) {
    const int lane = threadIdx.x % 32, split = threadIdx.x / 32 % SPLITS, part = threadIdx.x / 32 / SPLITS;
    const u32 first = part * ROW_TILES * TOKEN_TILES * 128 + lane * 4;
    const u32 sums = shared.base + SUMS_AT + (split * ROWS * TOKENS + first) * 4;
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
        for (int j = 0; j < TOKEN_TILES; ++j)
            put_shared_4(sums + (r * TOKEN_TILES + j) * 512, d[r][j]);
    if (NORM && counts && part == 0) {
#pragma unroll
        for (int j = 0; j < TOKEN_TILES; ++j) {
            float sum = squares[j];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            if (lane % 4 == 0)
                put_shared(shared.base + SQUARES_AT + (split * TOKENS + j * 8 + lane / 4) * 4, __float_as_uint(sum));
        }
    }
}

// The norm's weight, which no kernel writes: asked for before the ring of weights is, and put into shared memory by
// the warps that multiply.
constexpr int GAINS = (int(NORM_BYTES) / 8 + THREADS - 1) / THREADS;
struct Gains {
    float4 values[GAINS ? GAINS : 1];

    DEVICE void load(const float* norm) {
#pragma unroll
        for (int i = 0; i < GAINS; ++i) {
            const int column = 4 * (threadIdx.x + i * THREADS);
            values[i] = column < INNER ? *(const float4*)(norm + column) : float4{0.0f, 0.0f, 0.0f, 0.0f};
        }
    }
    DEVICE void put(const Shared& shared) const {
#pragma unroll
        for (int i = 0; i < GAINS; ++i) {
            const u32 at = 8 * (threadIdx.x + i * THREADS);
            const float4 v = values[i];
            if (at < NORM_BYTES) put_shared_2(shared.base + NORM_AT + at, pack(v.x, v.y), pack(v.z, v.w));
        }
        named_sync(1, THREADS);
    }
};
