// Products of dozens to thousands of tokens with e4m3 codes that have a scale for each row and 128 columns, x as e4m3
// codes with a scale for each token and 128 columns (hopper_quantize.cu): compute capability 9.0.
//
// As hopper_products.cu, which says more: a block takes tiles of X_ROWS tokens by ROWS rows of the weight; units of 128
// columns are copied into a ring of STAGES, here with their scales, by one warp or, with WINDOW units of the weight on
// their way at once, by two; warp groups, WG_M by WG_N, multiply 64 tokens by COLUMNS rows each; SHARE blocks of a cluster
// have the same rows of the weight, two (SPLIT) share a tile's columns. Tensor cores add the products of a unit with 14
// bits; scaled, units are added up in float32, as DeepSeek-V3 does (DeepSeek-AI, 2024, 3.3.2).
//
// Constants: RESULTS of INNER columns; WG_M, WG_N, COLUMNS (16 SIXTEENS), X_BOX (tokens that are copied, up to X_ROWS),
// X_SCALES (floats from the scales of x of 128 columns to the next's), STAGES, WINDOW, SPLIT, SHARE; OVERLAP (a unit's
// products are under way while the one before is scaled); GATED (0: no; else the activation: silu 1, gelu 2, gelu_tanh 3,
// relu 4; the weight has RESULTS gate rows, then as many up rows, and eights of either alternate in a tile); BIAS,
// RESIDUAL (whether there is one); R_ROW (elements from row to row).
#include "hopper.cuh"
#include "sums.cuh"

typedef unsigned char u8;
typedef unsigned short u16;

constexpr int UNIT = 128, HALVES = GATED ? 2 : 1, GROUPS = WG_M * WG_N, THREADS = 128 * GROUPS;
// What hopper_finish.cuh asks for: scales are done with when sums are there.
constexpr int CODE = 0, EXACT = 0, STATIC = 0, RESULT_CODE = 0, M_TILES = 1;
constexpr int X_ROWS = 64 * WG_M, ROWS = COLUMNS * WG_N, VALUES = COLUMNS / 2, STACKED = HALVES * RESULTS;
constexpr int TILE = ROWS / HALVES, TILES = (RESULTS + TILE - 1) / TILE, CLUSTER = SPLIT * SHARE, UNITS = INNER / UNIT;
// Tokens that are not copied need no space, as long as something lies there: their sums are no results.
constexpr u32 X_SPACE = (X_BOX + ROWS < X_ROWS ? X_ROWS : X_BOX) * UNIT, W_BYTES = ROWS * UNIT;
constexpr u32 STAGE_SPACE = X_SPACE + W_BYTES, SCALE_SPACE = (ROWS + X_ROWS) * 4;
constexpr u32 ALL_W = W_BYTES + ROWS * 4, ALL_X = X_BOX * UNIT + X_ROWS * 4;  // with their scales
constexpr u32 SCALES_AT = STAGES * STAGE_SPACE, BARRIERS_AT = SCALES_AT + STAGES * SCALE_SPACE;
constexpr u32 VECTORS_AT = BARRIERS_AT + (24 * STAGES + 8 + 15) / 16 * 16;  // of each warp group, what Finish keeps
constexpr u32 VECTOR = COLUMNS * 4, SENT_AT = VECTORS_AT + (BIAS ? GROUPS * 2 * VECTOR : 0);  // what a block is sent
constexpr int BUFFERS = OVERLAP ? 2 : 1;
static_assert(COLUMNS == 16 * SIXTEENS && RESULTS % 8 == 0 && INNER % UNIT == 0, "sixteens of rows, whole units");
static_assert(X_BOX <= X_ROWS && X_BOX % 8 == 0 && ROWS % (8 * HALVES * SHARE) == 0, "whole eights of rows are shared");
static_assert(SPLIT <= UNITS, "a unit for every block");

#define SUM(value) "+f"(value)
#define PASTE_(a, b) a##b
#define PASTE(a, b) PASTE_(a, b)
#define TEXT_(a) #a
#define TEXT(a) TEXT_(a)

// d (64 x COLUMNS) = a (64 x 32) @ b (COLUMNS x 32) transposed; plus d where `add`.
DEVICE void multiply(float (&d)[VALUES], u64 a, u64 b, u32 add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n" TEXT(COLUMNS) "k32.f32.e4m3.e4m3 {" PASTE(SUM_NAMES_, SIXTEENS)
                 "}, %0, %1, p, 1, 1;\n}"
                 : "+l"(a), "+l"(b), "+r"(add), PASTE(SUM_VALUES_, SIXTEENS)(d));
}

#include "hopper_halves.cuh"

DEVICE void launch_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

struct Shared {
    u32 base;
    DEVICE u32 full(u32 stage) const { return base + BARRIERS_AT + 24 * stage; }
    DEVICE u32 full_x(u32 stage) const { return full(stage) + 8; }
    DEVICE u32 empty(u32 stage) const { return full(stage) + 16; }
    DEVICE u32 sent() const { return full(STAGES); }  // the other block's sums are there
    DEVICE u32 x(u32 stage) const { return base + stage * STAGE_SPACE; }
    DEVICE u32 w(u32 stage) const { return x(stage) + X_SPACE; }
    // Of rows of the weight (gated: of gates, then of ups), then of tokens.
    DEVICE u32 scales(u32 stage) const { return base + SCALES_AT + stage * SCALE_SPACE; }
    DEVICE u32 x_scales(u32 stage) const { return scales(stage) + 4 * ROWS; }
};

// The place in a ring.
struct Ring {
    u32 stage = 0, parity = 0;
    DEVICE void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// What a block takes: items `first`, `first + step`, ..., which are a tile of rows of the weight and SHARE tiles of x,
// those of one tile behind each other; of each, `units` units from `unit` on.
struct Work {
    int share, split, x_items, items, first, step, unit, units;
    DEVICE explicit Work(int tokens) {
        const int rank = blockIdx.x % CLUSTER;
        share = rank % SHARE, split = rank / SHARE;
        x_items = (tokens + X_ROWS * SHARE - 1) / (X_ROWS * SHARE), items = TILES * x_items;
        first = blockIdx.x / CLUSTER, step = gridDim.x / CLUSTER;
        unit = UNITS * split / SPLIT, units = UNITS * (split + 1) / SPLIT - unit;
    }
    DEVICE int tile(int item) const { return item / x_items; }
    DEVICE int x_row(int item) const { return (item % x_items * SHARE + share) * X_ROWS; }
};

// A unit of a tile's rows of the weight, and their scales, of which there are STACKED for each unit; and what else is
// announced to its barrier.
DEVICE void copy_w(const Shared& shared, const Work& work, const TensorMap* weight, const float* scales, u32 stage, int tile,
                   int unit, u32 more) {
    barrier_expect(shared.full(stage), ALL_W + more);
    copy_rows(shared.w(stage) + work.share * (W_BYTES / SHARE), weight, shared.full(stage), unit * UNIT,
              tile * TILE + work.share * (TILE / SHARE), u16(((1 << SHARE) - 1) << work.split * SHARE));
#pragma unroll
    for (int half = 0; half < HALVES; ++half)
        copy_floats(shared.scales(stage) + 4 * half * TILE, scales + (long long)unit * STACKED + half * RESULTS + tile * TILE,
                    TILE, shared.full(stage));
}

// A unit of a tile's tokens, and their scales.
DEVICE void copy_tokens(const Shared& shared, const TensorMap* x, const float* x_scales, u32 stage, u32 barrier, int row,
                        int unit) {
    copy_2d(shared.x(stage), x, barrier, unit * UNIT, row);
    copy_floats(shared.x_scales(stage), x_scales + (long long)unit * X_SCALES + row, X_ROWS, barrier);
}

// By one thread: weights, which are no kernel's result.
DEVICE void copy_weight(const Shared& shared, const Work& work, const TensorMap* weight, const float* scales) {
    Ring ring, landed;
    int asked = 0;
    for (int item = work.first; item < work.items; item += work.step) {
        const int tile = work.tile(item);
        for (int i = 0; i < work.units; ++i, ring.next()) {
            if (asked++ >= WINDOW) {
                barrier_wait(shared.full(landed.stage), landed.parity);
                landed.next();
            }
            // Of a ring that has not gone round a place is empty: it counts as a phase of parity 1.
            barrier_wait(shared.empty(ring.stage), ring.parity ^ 1);
            copy_w(shared, work, weight, scales, ring.stage, tile, work.unit + i, 0);
        }
    }
}

// By another: tokens.
DEVICE void copy_x(const Shared& shared, const Work& work, const TensorMap* x, const float* x_scales) {
    wait_for_previous();
    Ring ring;
    for (int item = work.first; item < work.items; item += work.step) {
        const int row = work.x_row(item);
        for (int i = 0; i < work.units; ++i, ring.next()) {
            barrier_wait(shared.empty(ring.stage), ring.parity ^ 1);
            barrier_expect(shared.full_x(ring.stage), ALL_X);
            copy_tokens(shared, x, x_scales, ring.stage, shared.full_x(ring.stage), row, work.unit + i);
        }
    }
}

// By one thread: both.
DEVICE void copy_both(const Shared& shared, const Work& work, const TensorMap* weight, const float* scales,
                      const TensorMap* x, const float* x_scales) {
    const int ahead = work.first < work.items ? min(STAGES, work.units) : 0;
    for (int i = 0; i < ahead; ++i) copy_w(shared, work, weight, scales, i, work.tile(work.first), work.unit + i, ALL_X);
    wait_for_previous();
    Ring ring;
    for (int item = work.first; item < work.items; item += work.step) {
        const int tile = work.tile(item), row = work.x_row(item);
        for (int i = 0; i < work.units; ++i, ring.next()) {
            if (item != work.first || i >= ahead) {
                barrier_wait(shared.empty(ring.stage), ring.parity ^ 1);
                copy_w(shared, work, weight, scales, ring.stage, tile, work.unit + i, ALL_X);
            }
            copy_tokens(shared, x, x_scales, ring.stage, shared.full(ring.stage), row, work.unit + i);
        }
    }
}

// A unit's products, under way.
DEVICE void begin_unit(const Shared& shared, u32 stage, int group, float (&part)[VALUES]) {
    const u64 a = matrix(shared.x(stage) + group / WG_N * 64 * UNIT, 8 * UNIT, 16);
    const u64 b = matrix(shared.w(stage) + group % WG_N * COLUMNS * UNIT, 8 * UNIT, 16);
    product_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) multiply(part, a + 2 * k, b + 2 * k, k > 0);
    product_commit();
}

// They are there: scaled, they are added to `sum`.
DEVICE void end_unit(const Shared& shared, u32 stage, int group, float (&part)[VALUES], float (&sum)[VALUES]) {
    const int lane = threadIdx.x % 32;
    pin(part);
    const u32 of_x = shared.x_scales(stage) + 4 * (group / WG_N * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4);
    const float x_scale[2] = {get(of_x), get(of_x + 32)};
    const u32 of_rows = shared.scales(stage) + 4 * (group % WG_N * (COLUMNS / HALVES) + lane % 4 * 2);
#pragma unroll
    for (int g = 0; g < SIXTEENS; ++g)
#pragma unroll
        for (int o = 0; o < 2; ++o) {
            const float2 scale = get_2(of_rows + 4 * (GATED ? o * TILE + 8 * g : 16 * g + 8 * o));
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int i = 8 * g + 4 * o + 2 * h;
                sum[i] += part[i] * (scale.x * x_scale[h]);
                sum[i + 1] += part[i + 1] * (scale.y * x_scale[h]);
            }
        }
}

DEVICE void compute(const Shared& shared, const Work& work, Finish& finish, const float* bias) {
    const int lane = threadIdx.x % 32, group = threadIdx.x / 128;
    Ring ring;
    u32 done = 0;  // the stage that is released next
    for (int item = work.first; item < work.items; item += work.step) {
        finish.begin(group, work.tile(item), work.x_row(item), nullptr, bias);
        if (item == work.first) wait_for_previous();
        finish.begin_x(nullptr);
        Halves halves;
        halves.load(finish, work.split);
        float sum[VALUES];
#pragma unroll
        for (int i = 0; i < VALUES; ++i) sum[i] = 0.0f;
        float part[OVERLAP ? 2 : 1][VALUES];
        auto begin = [&](float (&part)[VALUES]) {
            barrier_wait(shared.full(ring.stage), ring.parity);
            if (WINDOW) barrier_wait(shared.full_x(ring.stage), ring.parity);
            begin_unit(shared, ring.stage, group, part);
            ring.next();
        };
        auto end = [&](float (&part)[VALUES]) {
            end_unit(shared, done, group, part, sum);
            __syncwarp();
            if (SHARE == 1) {
                if (lane == 0) barrier_arrive(shared.empty(done));
            } else if (lane < SHARE) {
                arrive_at_block(shared.empty(done), work.split * SHARE + lane);
            }
            if (++done == STAGES) done = 0;
        };
        if (OVERLAP) {
            // Of two units: one's products while the other is scaled.
            begin(part[0]);
            int i = 2;
            for (; i < work.units; i += 2) {
                begin(part[1 % BUFFERS]);
                product_wait<1>();
                end(part[0]);
                begin(part[0]);
                product_wait<1>();
                end(part[1 % BUFFERS]);
            }
            if (i == work.units) {
                begin(part[1 % BUFFERS]);
                product_wait<1>();
                end(part[0]);
                product_wait<0>();
                end(part[1 % BUFFERS]);
            } else {
                product_wait<0>();
                end(part[0]);
            }
        } else {
            for (int i = 0; i < work.units; ++i) {
                begin(part[0]);
                product_wait<0>();
                end(part[0]);
            }
        }
        finish.sums_are_there(group);
        auto value = [&](int, int i) { return sum[i]; };
        if (SPLIT == 1) finish.all(value);
        else halves.meet(finish, work.split, shared.base + SENT_AT + threadIdx.x * 16, shared.sent(), value);
    }
}

// Where sums need more registers than an even share, the copying warp group gives some up.
constexpr bool UNEVEN = GROUPS == 2 && (1 + BUFFERS) * VALUES >= 128;
constexpr int COPIERS = UNEVEN ? 128 : 64;
static_assert(GROUPS <= 2 || (1 + BUFFERS) * VALUES < 128, "registers for two");

extern "C" __global__ void __launch_bounds__(THREADS + COPIERS, 1) __cluster_dims__(SPLIT * SHARE, 1, 1)
    blocks(const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x, const u8* packed,
           const float* x_scales, const float* bias, const u16* residual, u16* out, int tokens) {
    extern __shared__ unsigned char memory[];
    const Shared shared{(shared_address(memory) + 1023) / 1024 * 1024};
    const Work work(tokens);
    // Scales lie behind the codes.
    const long long codes = ((long long)STACKED * INNER + 255) / 256 * 256;
    const float* scales = reinterpret_cast<const float*>(packed + codes);
    if (threadIdx.x == THREADS) {
        prefetch_map(&weight);
        prefetch_map(&x);
        for (u32 i = 0; i < STAGES; ++i) {
            barrier_init(shared.full(i), 1);
            barrier_init(shared.full_x(i), 1);
            barrier_init(shared.empty(i), 4 * GROUPS * SHARE);
        }
        if (SPLIT > 1) {
            barrier_init(shared.sent(), 1);
            barrier_expect(shared.sent(), sent_bytes(work.split));
        }
        barrier_init_fence();
    }
    __syncthreads();
    if (SHARE > 1) cluster_sync();  // the others' barriers are there
    if (SPLIT > 1) cluster_arrive_relaxed();
    launch_next();
    if (threadIdx.x >= THREADS) {
        if (UNEVEN) registers_less<24>();
        if (threadIdx.x == THREADS) {
            if (WINDOW) copy_weight(shared, work, &weight, scales);
            else copy_both(shared, work, &weight, scales, &x, x_scales);
        }
        if (WINDOW && threadIdx.x == THREADS + 32) copy_x(shared, work, &x, x_scales);
        __syncwarp();
        if (SPLIT > 1) cluster_wait();
    } else {
        if (UNEVEN) registers_more<240>();
        if (work.first >= work.items) wait_for_previous();
        Finish finish;
        finish.vectors = shared.base + VECTORS_AT + threadIdx.x / 128 * 2 * VECTOR;
        finish.tokens = tokens, finish.residual = residual, finish.out = out;
        compute(shared, work, finish, bias);
    }
    if (SHARE > 1) cluster_sync();  // no block's barriers are arrived at after its end
}
