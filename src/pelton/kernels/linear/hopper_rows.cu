// Products of up to 16 tokens with a matrix on compute capability 9.0, bound by the memory that holds the matrix.
//
// A block takes tiles of ROWS whole rows of the weight, every WORKERS-th, so that no block waits for another's
// sums. One warp copies weights and x through tensor maps into a ring of STAGES tiles of BOXES * 64 columns; it
// begins with a ring of weights before the kernel ahead in the stream has ended, since weights are no kernel's
// result. WARPS multiply, in SPLITS that take turns in a tile's columns and parts that divide its rows; the sums of
// splits are added up in shared memory at a tile's end, in one order. The RMS norm before (NORM) costs no pass of
// its own: x is multiplied by the norm's weight as it is read, its squares are summed on the way, and the sums
// scaled at the end.
//
// Constants: RESULTS of INNER columns; TOKENS at most (8 or a multiple of 16); ROWS (a multiple of 16 for each
// part); BOXES; STAGES; WARPS; SPLITS; WORKERS (blocks);
// GATED (0: no; else the activation: silu 1, gelu 2, gelu_tanh 3, relu 4; the weight has RESULTS gate rows, then
// as many up rows, and half of a tile is of either); NORM; BIAS, RESIDUAL (whether there is one); R_ROW (elements
// from row to row of the residual), HALF (float16 instead of bfloat16; not with NORM).
#include "hopper.cuh"

constexpr int THREADS = 32 * WARPS, ROW_BYTES = 128;
constexpr int OUT_ROWS = GATED ? ROWS / 2 : ROWS;
constexpr int OUT_ROWS_16 = (OUT_ROWS + 15) / 16 * 16;
constexpr int N_TILES = (RESULTS + OUT_ROWS - 1) / OUT_ROWS;
constexpr int STEPS = (INNER + 64 * BOXES - 1) / (64 * BOXES);  // of a tile: filled places of the ring
constexpr int TILES = (N_TILES + WORKERS - 1) / WORKERS;  // of a block; those past the end are empty
constexpr int PARTS = WARPS / SPLITS, ROW_TILES = ROWS / 16 / PARTS, TOKEN_TILES = TOKENS / 8;
constexpr u32 W_BOX = ROWS * ROW_BYTES, X_BOX = TOKENS * ROW_BYTES, STAGE_BYTES = BOXES * (W_BOX + X_BOX);
constexpr u32 NORM_AT = STAGES * STAGE_BYTES, NORM_BYTES = NORM ? STEPS * BOXES * 64 * 2 : 0;
// With one tile, the ring is no longer used when the sums are made.
constexpr u32 SUMS_BYTES = SPLITS * ROWS * TOKENS * 4, SUMS_AT = TILES == 1 ? 0 : NORM_AT + NORM_BYTES;
constexpr u32 SQUARES_AT = TILES == 1 ? NORM_AT + NORM_BYTES : SUMS_AT + SUMS_BYTES;
constexpr u32 BARRIERS_AT = SQUARES_AT + SPLITS * TOKENS * 4;
static_assert(!(NORM && HALF), "x times the norm's weight may be too large for float16");
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
DEVICE void load_2(u32 (&r)[2], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(address)
                 : "memory");
}
// d (16 x 8) += a (16 x 16) @ b (8 x 16) transposed.
DEVICE void multiply(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." ELEMENT "." ELEMENT
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
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

DEVICE float activate(float v) {
    if (GATED == 1) return v / (1.0f + __expf(-v));
    if (GATED == 2) return 0.5f * v * (1.0f + erff(v * 0.7071067811865476f));
    if (GATED == 3) {
        const float u = 0.7978845608028654f * (v + 0.044715f * v * v * v);
        return 0.5f * v * (2.0f - 2.0f / (__expf(2.0f * u) + 1.0f));
    }
    return fmaxf(v, 0.0f);
}

struct Shared {
    u32 base;
    DEVICE u32 full(u32 stage) const { return base + BARRIERS_AT + 16 * stage; }
    DEVICE u32 empty(u32 stage) const { return full(stage) + 8; }
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

DEVICE void copy_weights(const Shared& shared, const TensorMap* map, u32 stage, int step) {
    const int row = (blockIdx.x + step / STEPS * WORKERS) * OUT_ROWS, column = step % STEPS * BOXES * 64;
    barrier_expect(shared.full(stage), STAGE_BYTES);
#pragma unroll
    for (int i = 0; i < BOXES; ++i) {
        const u32 target = shared.weights(stage) + i * W_BOX;
        copy_2d(target, map, shared.full(stage), column + 64 * i, row);
        if (GATED) copy_2d(target + W_BOX / 2, map, shared.full(stage), column + 64 * i, RESULTS + row);
    }
}

DEVICE void copy_x(const Shared& shared, const TensorMap* map, u32 stage, int step) {
#pragma unroll
    for (int i = 0; i < BOXES; ++i)
        copy_2d(shared.x(stage) + i * X_BOX, map, shared.full(stage), (step % STEPS * BOXES + i) * 64, 0);
}

// By one thread.
DEVICE void copy(const Shared& shared, const TensorMap* weight, const TensorMap* x) {
    constexpr int steps = TILES * STEPS, ahead = STAGES < steps ? STAGES : steps;
    for (int i = 0; i < ahead; ++i) copy_weights(shared, weight, i, i);
    wait_for_previous();
    for (int i = 0; i < ahead; ++i) copy_x(shared, x, i, i);
    Ring ring;
    for (int step = ahead; step < steps; ++step) {
        barrier_wait(shared.empty(ring.stage), ring.parity);
        copy_weights(shared, weight, ring.stage, step);
        copy_x(shared, x, ring.stage, step);
        ring.next();
    }
}

// Where a value lies in a split's sums: as the tensor core's results do, 16 rows by 8 tokens after another.
DEVICE u32 place(int row, int token) {
    return ((row / 16 * TOKEN_TILES + token / 8) * 32 + row % 8 * 4 + token % 8 / 2) * 4 + row % 16 / 8 * 2 + token % 2;
}

// A tile's sums of all splits, and what follows: scale, bias, activation, residual.
DEVICE void finish(const Shared& shared, int tile, int tokens, float eps, const float* bias,
                   const unsigned short* residual, unsigned short* out) {
    for (int i = threadIdx.x; i < OUT_ROWS_16 * TOKENS; i += THREADS) {
        // Element i % 4 of lane i / 4 % 32 of a result of the tensor core, as `place` says.
        const int lane = i / 4 % 32, cell = i / 128;
        const int row = cell / TOKEN_TILES * 16 + lane / 4 + i % 4 / 2 * 8;
        const int m = cell % TOKEN_TILES * 8 + lane % 4 * 2 + i % 2, n = tile * OUT_ROWS + row;
        if (row >= OUT_ROWS || m >= tokens || n >= RESULTS) continue;
        float v = 0.0f, up = 0.0f;
#pragma unroll
        for (int w = 0; w < SPLITS; ++w) {
            const u32 sums = shared.base + SUMS_AT + w * ROWS * TOKENS * 4;
            v += shared_float(sums + i * 4);
            if (GATED) up += shared_float(sums + place(row + OUT_ROWS, m) * 4);
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
        if (RESIDUAL) v += low_half(residual[(long long)m * R_ROW + n]);
        out[(long long)m * RESULTS + n] = pack(v, 0.0f);
    }
}

DEVICE void compute(const Shared& shared, int tokens, float eps, const float* bias,
                    const unsigned short* residual, unsigned short* out) {
    const int lane = threadIdx.x % 32, split = threadIdx.x / 32 % SPLITS, part = threadIdx.x / 32 / SPLITS;
    // Of the eight rows by eight columns that this lane points to: rows of the weight, then columns; of x, columns,
    // then tokens.
    const int w_row = lane % 16, w_chunk = lane / 16;
    const int x_row = TOKENS == 8 ? lane % 8 : lane / 16 * 8 + lane % 8, x_chunk = lane / 8 % 2;
    float d[ROW_TILES][TOKEN_TILES][4], squares[TOKEN_TILES];
    Ring ring;
#pragma unroll
    for (int j = 0; j < TOKEN_TILES; ++j) squares[j] = 0.0f;
    for (int step = 0; step < TILES * STEPS; ++step) {
        if (step % STEPS == 0) {
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
                for (int j = 0; j < TOKEN_TILES; ++j)
#pragma unroll
                    for (int e = 0; e < 4; ++e) d[r][j][e] = 0.0f;
        }
        barrier_wait(shared.full(ring.stage), ring.parity);
#pragma unroll
        for (int s = 0; s < (4 * BOXES + SPLITS - 1) / SPLITS; ++s) {
            const int sixteenth = s * SPLITS + split, box = sixteenth / 4, chunk = sixteenth % 4 * 2;
            if (4 * BOXES % SPLITS != 0 && box >= BOXES) break;
            u32 b[TOKEN_TILES][2];
            const u32 x = shared.x(ring.stage) + box * X_BOX + x_row * ROW_BYTES + (((chunk + x_chunk) ^ (x_row % 8)) * 16);
            if constexpr (TOKENS == 8) {
                load_2(b[0], x);
            } else {
#pragma unroll
                for (int j = 0; j < TOKEN_TILES; j += 2) {
                    u32 both[4];
                    load_4(both, x + j * 8 * ROW_BYTES);
                    b[j][0] = both[0], b[j][1] = both[1], b[j + 1][0] = both[2], b[j + 1][1] = both[3];
                }
            }
            if (NORM) {
                const int column = (step % STEPS * BOXES + box) * 64 + chunk * 8 + lane % 4 * 2;
                const u32 at = shared.base + NORM_AT + column * 2;
                const u32 gains[2] = {shared_word(at), shared_word(at + 16)};
#pragma unroll
                for (int j = 0; j < TOKEN_TILES; ++j) {
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        if (step < STEPS && part == 0) {
                            const float low = low_half(b[j][h]), high = high_half(b[j][h]);
                            squares[j] += low * low + high * high;
                        }
                        b[j][h] = times(b[j][h], gains[h]);
                    }
                }
            }
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r) {
                u32 a[4];
                load_4(a, shared.weights(ring.stage) + box * W_BOX + ((part * ROW_TILES + r) * 16 + w_row) * ROW_BYTES +
                              (((chunk + w_chunk) ^ (w_row % 8)) * 16));
#pragma unroll
                for (int j = 0; j < TOKEN_TILES; ++j) multiply(d[r][j], a, b[j]);
            }
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(shared.empty(ring.stage));
        ring.next();
        if ((step + 1) % STEPS != 0) continue;

        if (TILES == 1) named_sync(1, THREADS);  // the last of the ring has been read
        const u32 first = part * ROW_TILES * TOKEN_TILES * 128 + lane * 4;
        const u32 sums = shared.base + SUMS_AT + (split * ROWS * TOKENS + first) * 4;
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
            for (int j = 0; j < TOKEN_TILES; ++j)
                asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(sums + (r * TOKEN_TILES + j) * 512),
                             "f"(d[r][j][0]), "f"(d[r][j][1]), "f"(d[r][j][2]), "f"(d[r][j][3])
                             : "memory");
        if (NORM && step < STEPS && part == 0) {
#pragma unroll
            for (int j = 0; j < TOKEN_TILES; ++j) {
                float sum = squares[j];
                sum += __shfl_xor_sync(~0u, sum, 1);
                sum += __shfl_xor_sync(~0u, sum, 2);
                if (lane % 4 == 0)
                    put_shared(shared.base + SQUARES_AT + (split * TOKENS + j * 8 + lane / 4) * 4, __float_as_uint(sum));
            }
        }
        named_sync(1, THREADS);
        finish(shared, blockIdx.x + step / STEPS * WORKERS, tokens, eps, bias, residual, out);
        named_sync(1, THREADS);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS + 32, 1)
    product(const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x, const float* norm,
            const float* bias, const unsigned short* residual, unsigned short* out, int tokens, float eps) {
    extern __shared__ unsigned char memory[];
    const Shared shared{(shared_address(memory) + 1023) / 1024 * 1024};
    if (threadIdx.x == 0) {
        prefetch_map(&weight);
        prefetch_map(&x);
        for (u32 i = 0; i < STAGES; ++i) {
            barrier_init(shared.full(i), 1);
            barrier_init(shared.empty(i), WARPS);
        }
        barrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x == 0) launch_next();
    if (threadIdx.x >= THREADS) {
        if (threadIdx.x == THREADS) copy(shared, &weight, &x);
        else wait_for_previous();
    } else {
        if (NORM) {  // a weight, as the matrix is
            for (int i = threadIdx.x; i < int(NORM_BYTES / 4); i += THREADS) {
                const int column = 2 * i;
                put_shared(shared.base + NORM_AT + 4 * i, column < INNER ? pack(norm[column], norm[column + 1]) : 0);
            }
            named_sync(1, THREADS);
        }
        wait_for_previous();
        compute(shared, tokens, eps, bias, residual, out);
    }
}
