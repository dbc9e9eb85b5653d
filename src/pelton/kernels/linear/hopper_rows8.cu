// Products of up to 16 tokens with a matrix of 8-bit codes and a scale a row (layout rows8, gpu_rows8.py) on compute
// capability 9.0, bound by the memory that holds the matrix: hopper_rows.cuh says how. Splits take turns in a tile's
// boxes of 128 columns: a warp waits for its own alone.
//
// Codes become float16, which holds them all, by one or two instructions a pair. So must x, whose range may be too
// large for it: of each token and 128 columns it is multiplied by the power of two that brings the largest value
// below 2^16, and their sum by its inverse. What is over 2^32 times smaller than that keeps fewer bits, which is
// far below what float32 sums keep. Columns of a product of 16 are taken in the order in which `ldmatrix`, made for
// elements of 16 bits, gives bytes: lane 4 g + q has columns 4 q to 4 q + 3 of row g.
//
// Of X_CODES x is codes with one scale, which float16 holds as they are.
//
// With GROUPED, rows have a scale for each 128 columns, those of all rows for a box behind each other: the sums of a box
// are multiplied with them.
//
// Constants besides: CODE (e4m3 1, int8 2; of x, too), SCALES (where the weight's scales begin), GROUPED.
constexpr int COLUMNS = 128;
constexpr bool ROW_SCALES = !GROUPED;
#include "hopper_rows.cuh"

static_assert(!HALF && INNER % COLUMNS == 0 && SPLITS % BOXES == 0, "whole boxes, each of one split");
static_assert(!X_CODES || (!NORM && !GROUPED), "x is multiplied by nothing but its scale, at the end");
static_assert(SPLITS / BOXES <= STAGES, "a warp is at most a lap ahead of another");

constexpr u32 OWN_AT = (BARRIERS_AT + 24 * STAGES + 15) / 16 * 16;  // 256 bytes of each warp

DEVICE u64 shared_words(u32 address) {
    u64 y;
    asm volatile("ld.shared.u64 %0, [%1];" : "=l"(y) : "r"(address) : "memory");
    return y;
}
// Four codes as pairs of float16: columns 0 and 1, 2 and 3.
DEVICE void decode(u32 codes, u32& low, u32& high) {
    if (CODE == 1) {
        asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.rn.f16x2.e4m3x2 %0, a; cvt.rn.f16x2.e4m3x2 %1, b;}"
            : "=r"(low), "=r"(high)
            : "r"(codes));
    } else {  // 0x6400 | u is 1024 + u, and u is 128 more than the code
        const u32 u = codes ^ 0x80808080;
        asm("add.rn.f16x2 %0, %1, %2;" : "=r"(low) : "r"(__byte_perm(u, 0x64646464, 0x4140)), "r"(0xe480e480));
        asm("add.rn.f16x2 %0, %1, %2;" : "=r"(high) : "r"(__byte_perm(u, 0x64646464, 0x4342)), "r"(0xe480e480));
    }
}
// d (16 x 8) += a (16 x 16) @ b (8 x 16) transposed.
DEVICE void multiply(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
DEVICE u32 larger(u32 a, u32 b) {  // of magnitudes; the sign is of no meaning
    u32 y;
    asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}
DEVICE u32 pack_f16(float low, float high) {
    u32 y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

DEVICE void copy_weights(const Shared& shared, const TensorMap* map, u32 stage, int step) {
    const int row = (blockIdx.x + step / STEPS * WORKERS) * OUT_ROWS, box = step % STEPS * BOXES;
    barrier_expect(shared.full(stage), BOXES * W_BOX);
    if (GATED) {  // gate and up of a box follow each other
#pragma unroll
        for (int i = 0; i < BOXES; ++i) {
            const u32 target = shared.weights(stage) + i * W_BOX;
            copy_3d(target, map, shared.full(stage), 0, row, box + i);
            copy_3d(target + W_BOX / 2, map, shared.full(stage), 0, RESULTS + row, box + i);
        }
    } else {
        copy_3d(shared.weights(stage), map, shared.full(stage), 0, row, box);
    }
}

DEVICE void copy_x(const Shared& shared, const TensorMap* map, u32 stage, int step) {
    barrier_expect(shared.full_x(stage), BOXES * X_BOXES * X_BOX);
    copy_3d(shared.x(stage), map, shared.full_x(stage), 0, 0, step % STEPS * BOXES * X_BOXES);
}

// Where the magnitude of x is `largest` at most, as bfloat16: its exponent, and a power of two that makes it float16.
DEVICE u32 exponent_of(u32 largest) { return max(largest >> 7, 16u); }
DEVICE u32 scale_of(u32 exponent) {
    const u32 by = (269 - exponent) << 7;  // 2^(142 - exponent), whose inverse is a normal number too
    return by | by << 16;
}
DEVICE float inverse_of(u32 exponent) { return __uint_as_float((exponent - 15) << 23); }
DEVICE u32 scaled_f16(u32 pair, u32 scale) {
    const u32 scaled = times(pair, scale);
    return pack_f16(low_half(scaled), high_half(scaled));
}

// x of 8 tokens and 128 columns from `at` on as the products' second operand (columns 16 s + 4 q to 4 q + 3 of token
// g), and the factors of the sums of tokens 2 q and 2 q + 1. `gains`: where the norm's weights of the columns lie.
DEVICE void load_x(u32 (&b)[8][2], float (&factors)[2], u32 at, u32 gains, float& squares, bool counts) {
    const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const u32 row = at + g * ROW_BYTES + q % 2 * 8, chunk = (q / 2 ^ g) * 16;
    u32 most[2] = {0, 0};
#pragma unroll
    for (int s = 0; s < 8; ++s) {
        const u64 words = shared_words(row + s / 4 * X_BOX + (s % 4 * 32 ^ chunk));
        b[s][0] = u32(words), b[s][1] = u32(words >> 32);
        if (NORM) {
            const u64 gain = shared_words(gains + s * 32 + q * 8);
            if (counts) {
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const float low = low_half(b[s][h]), high = high_half(b[s][h]);
                    squares += low * low + high * high;
                }
            }
            b[s][0] = times(b[s][0], u32(gain)), b[s][1] = times(b[s][1], u32(gain >> 32));
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) most[h] = larger(most[h], b[s][h]);
    }
    const u32 both = larger(most[0], most[1]);
    u32 largest = max(both & 0x7fff, both >> 16 & 0x7fff);
    largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = max(largest, __shfl_xor_sync(~0u, largest, 2));
    const u32 exponent = exponent_of(largest), scale = scale_of(exponent);
#pragma unroll
    for (int s = 0; s < 8; ++s)
#pragma unroll
        for (int h = 0; h < 2; ++h) b[s][h] = scaled_f16(b[s][h], scale);
#pragma unroll
    for (int i = 0; i < 2; ++i) factors[i] = inverse_of(__shfl_sync(~0u, exponent, (2 * q + i) * 4));
}

// The same of one token: a lane does four columns, and `own`, 256 bytes of the warp, gives them to all.
DEVICE void load_x_of_one(u32 (&b)[8][2], float (&factors)[2], u32 at, u32 own, u32 gains, float& squares, bool counts) {
    const int lane = threadIdx.x % 32;
    const u64 words = shared_words(at + lane / 16 * X_BOX + lane % 16 * 8);
    u32 w[2] = {u32(words), u32(words >> 32)};
    if (NORM) {
        const u64 gain = shared_words(gains + lane * 8);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float low = low_half(w[h]), high = high_half(w[h]);
            if (counts) squares += low * low + high * high;
            w[h] = times(w[h], h ? u32(gain >> 32) : u32(gain));
        }
    }
    const u32 both = larger(w[0], w[1]);
    const u32 exponent = exponent_of(__reduce_max_sync(~0u, max(both & 0x7fff, both >> 16 & 0x7fff)));
    const u32 scale = scale_of(exponent);
    put_shared_2(own + lane * 8, scaled_f16(w[0], scale), scaled_f16(w[1], scale));
    __syncwarp();
#pragma unroll
    for (int s = 0; s < 8; ++s) {
        const u64 pair = shared_words(own + s * 32 + lane % 4 * 8);
        b[s][0] = u32(pair), b[s][1] = u32(pair >> 32);
    }
    __syncwarp();
    factors[0] = factors[1] = inverse_of(exponent);
}

// The same of codes, which need no factors.
DEVICE void load_x_codes(u32 (&b)[8][2], u32 at) {
    const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
#pragma unroll
    for (int s = 0; s < 8; ++s) decode(shared_word(at + g * ROW_BYTES + (s ^ g) * 16 + q * 4), b[s][0], b[s][1]);
}

// Of GROUPED, the scales of this lane's rows for a box of the tile.
DEVICE void load_group_scales(float (&d)[ROW_TILES][2], int turn, int box, const float* scales) {
    const int part = threadIdx.x / 32 / SPLITS;
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = (part * ROW_TILES + r) * 16 + threadIdx.x % 32 / 4 + 8 * h;
            const int half = GATED && row >= OUT_ROWS, n = (blockIdx.x + turn * WORKERS) * OUT_ROWS + row - half * OUT_ROWS;
            d[r][h] = n < RESULTS && box * COLUMNS < INNER ? __ldg(scales + box * (GATED ? 2 * RESULTS : RESULTS) + half * RESULTS + n) : 0.0f;
        }
}

DEVICE void compute(const Shared& shared, int tokens, float eps, const float* scales, const float* bias,
                    const unsigned short* residual, unsigned short* out, float x_scale, float result_scale) {
    const int lane = threadIdx.x % 32, split = threadIdx.x / 32 % SPLITS, part = threadIdx.x / 32 / SPLITS;
    // What this lane points `ldmatrix` to: a row, and one of two chunks of 16 columns.
    const u32 w_row = (part * ROW_TILES * 16 + lane % 16) * ROW_BYTES, w_chunk = (lane / 16 ^ lane % 8) * 16;
    float squares[TOKEN_TILES];
#pragma unroll
    for (int j = 0; j < TOKEN_TILES; ++j) squares[j] = 0.0f;
    Besides besides;
    if (ROW_SCALES) load_scales(besides, 0, scales);
    wait_for_previous();
    int box = split;  // of all tiles
    for (int turn = 0; turn < TILES; ++turn) {
        if (ROW_SCALES && turn) load_scales(besides, turn, scales);
        load_residual(besides, turn, tokens, residual);
        float d[ROW_TILES][TOKEN_TILES][4];
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
            for (int j = 0; j < TOKEN_TILES; ++j) d[r][j][0] = d[r][j][1] = d[r][j][2] = d[r][j][3] = 0.0f;
#pragma unroll 1
        for (; box < (turn + 1) * STEPS * BOXES; box += SPLITS) {
            const u32 step = box / BOXES, stage = step % STAGES, lap = step / STAGES, place = box % BOXES;
            float of_rows[ROW_TILES][2];
            if (GROUPED) load_group_scales(of_rows, turn, box - turn * STEPS * BOXES, scales);
            // Another warp may have had the place before: while that lap's copies are not there, the barrier's parity
            // is that of this lap.
            barrier_wait(shared.empty(stage), (lap + 1) % 2);
            barrier_wait(shared.full_x(stage), lap % 2);
            u32 b[TOKEN_TILES][8][2];
            float factors[TOKEN_TILES][2];
            const u32 x = shared.x(stage) + place * X_BOXES * X_BOX;
            const u32 gains = shared.base + NORM_AT + (box - turn * STEPS * BOXES) * COLUMNS * 2;
            const bool counts = turn == 0 && part == 0;
            if (X_CODES) {
#pragma unroll
                for (int j = 0; j < TOKEN_TILES; ++j) load_x_codes(b[j], x + j * 8 * ROW_BYTES);
            } else if (TOKENS == 8 && tokens == 1) {
                load_x_of_one(b[0], factors[0], x, shared.base + OWN_AT + threadIdx.x / 32 * 256, gains, squares[0], counts);
            } else {
#pragma unroll
                for (int j = 0; j < TOKEN_TILES; ++j)
                    load_x(b[j], factors[j], x + j * 8 * ROW_BYTES, gains, squares[j], counts);
            }
            barrier_wait(shared.full(stage), lap % 2);
            float now[ROW_TILES][TOKEN_TILES][4];  // of X_CODES not used
#pragma unroll
            for (int pair = 0; pair < 4; ++pair) {
#pragma unroll
                for (int r = 0; r < ROW_TILES; ++r) {
                    u32 codes[4], a[2][4];
                    load_4(codes, shared.weights(stage) + place * W_BOX + w_row + r * 16 * ROW_BYTES +
                                      (pair * 32 ^ w_chunk));
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        decode(codes[2 * h], a[h][0], a[h][2]);
                        decode(codes[2 * h + 1], a[h][1], a[h][3]);
#pragma unroll
                        for (int j = 0; j < TOKEN_TILES; ++j) {
                            if (pair == 0 && h == 0) now[r][j][0] = now[r][j][1] = now[r][j][2] = now[r][j][3] = 0.0f;
                            multiply(X_CODES ? d[r][j] : now[r][j], a[h], b[j][2 * pair + h]);
                        }
                    }
                }
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(shared.empty(stage));
#pragma unroll
            for (int r = 0; r < (X_CODES ? 0 : ROW_TILES); ++r)
#pragma unroll
                for (int j = 0; j < TOKEN_TILES; ++j)
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        d[r][j][e] += (GROUPED ? factors[j][e % 2] * of_rows[r][e / 2] : factors[j][e % 2]) * now[r][j][e];
        }
        if (NORM && TOKENS == 8 && tokens == 1 && turn == 0) {  // `leave` adds up four lanes
#pragma unroll
            for (int i = 4; i < 32; i *= 2) squares[0] += __shfl_xor_sync(~0u, squares[0], i);
        }
        if (TILES == 1) named_sync(1, THREADS);  // the last of the ring has been read
        leave(shared, d, squares, turn == 0);
        if (ROW_SCALES) put_scales(shared, besides, X_CODES ? x_scale : 1.0f);
        named_sync(1, THREADS);
        finish(shared, turn, tokens, eps, bias, besides, out, result_scale);
        named_sync(1, THREADS);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS + 64, 1)
    product(const __grid_constant__ TensorMap codes, const unsigned char* weight, const __grid_constant__ TensorMap x,
            const float* norm, const float* bias, const unsigned short* residual, unsigned short* out, int tokens,
            float eps, float x_scale, float result_scale) {
    extern __shared__ unsigned char memory[];
    const Shared shared{(shared_address(memory) + 1023) / 1024 * 1024};
    Gains gains;
    if (threadIdx.x >= THREADS) begin(shared, &codes, &x, BOXES * PARTS);
    else if (NORM) gains.load(norm);
    __syncthreads();
    if (threadIdx.x >= THREADS) {
        copy(shared, &codes, &x);
    } else {
        if (NORM) gains.put(shared);
        compute(shared, tokens, eps, (const float*)(weight + SCALES), bias, residual, out, x_scale,
                result_scale);
    }
}
