// Products of some dozens to thousands of rows with a matrix, both along the sum: compute capability 9.0.
//
// A block takes tiles of X_ROWS rows of x by ROWS rows of the weight. Warps copy 128 bytes of each row through tensor
// maps into a ring of STAGES; they begin with weights, before the kernel ahead in the stream has ended. In small steps
// x has a warp of its own, and WINDOW units of the weight are on their way at once, since x stands behind all that has
// been asked for; with WINDOW 0 one warp copies both. Warp groups, WG_M by WG_N, multiply M_TILES times 64 rows of x by
// COLUMNS rows of the weight each: x is the tensor core's tall operand, since rows of the weight can then be dealt out
// to multiprocessors in sixteens.
//
// Blocks may form clusters of SPLIT x SHARE. SHARE blocks have the same rows of the weight: each copies a share of
// them to all. Two blocks (SPLIT) share a tile's columns: each sends the other a half of its sums, and adds what it is
// sent to its own half. Such clusters take one tile each.
//
// With codes (CODE 1: e4m3, 2: int8) x and weight have 8 bits, a float32 scale for each row; of STATIC, x has one scale.
// With RESULT_CODE (the same numbers; 0: none) the result is codes of one scale, too. Of EXACT, x is two
// codes: rows 16 i + j and 16 i + j + 8 are the high and the low part of row 8 i + j, and meet in a thread: high +
// low / 16 (e4m3), 256 high + low (int8). Tensor cores add products of e4m3 with 14 bits: every PROMOTE units (0:
// never) sums are taken over in float32.
//
// GROUP times SHARE tiles of x (0: all) meet all rows of the weight before the next do, so that L2 holds them.
//
// Constants: CODE (0: bfloat16, or float16 with HALF), RESULTS of INNER columns; WG_M, WG_N, M_TILES, COLUMNS
// (16 SIXTEENS), X_BOX (rows of x that are copied, up to X_ROWS), STAGES, WINDOW, SPLIT, SHARE, GROUP, PROMOTE, EXACT,
// STATIC, RESULT_CODE;
// GATED (0: no; else the activation: silu 1, gelu 2, gelu_tanh 3, relu 4; the weight has RESULTS gate rows, then as many
// up rows, and eights of either alternate in a tile); BIAS, RESIDUAL (whether there is one); R_ROW (elements from row to
// row).
#include "hopper.cuh"
#include "sums.cuh"

typedef unsigned char u8;
typedef unsigned short u16;

constexpr int ROW_BYTES = 128, UNIT = CODE ? 128 : 64, HALVES = GATED ? 2 : 1;
constexpr int GROUPS = WG_M * WG_N, THREADS = 128 * GROUPS;
constexpr int X_ROWS = 64 * M_TILES * WG_M, ROWS = COLUMNS * WG_N, VALUES = COLUMNS / 2;
constexpr int TOKENS = EXACT ? X_ROWS / 2 : X_ROWS;  // of a tile
constexpr int TILE = ROWS / HALVES, TILES = (RESULTS + TILE - 1) / TILE, CLUSTER = SPLIT * SHARE;
constexpr int UNITS = (INNER + UNIT - 1) / UNIT;
// Rows of x that are not copied need no space, as long as something lies there: their sums are no results.
constexpr u32 X_SPACE = (X_BOX + ROWS < X_ROWS ? X_ROWS : X_BOX) * ROW_BYTES, W_BYTES = ROWS * ROW_BYTES;
constexpr u32 STAGE_SPACE = X_SPACE + W_BYTES;
constexpr u32 X_BYTES = X_BOX * ROW_BYTES, BARRIERS_AT = STAGES * STAGE_SPACE;
// Scales of the tile's rows of the weight and what is added to them, of each warp group.
constexpr u32 SCALES_AT = BARRIERS_AT + (24 * STAGES + 8 + 15) / 16 * 16, VECTOR = COLUMNS * 4;
constexpr u32 SENT_AT = SCALES_AT + (CODE || BIAS ? GROUPS * 2 * VECTOR : 0);  // what a block is sent
static_assert(COLUMNS == 16 * SIXTEENS && RESULTS % 8 == 0, "sixteens of rows");
static_assert(X_BOX <= X_ROWS && X_BOX % 8 == 0 && ROWS % (8 * HALVES * SHARE) == 0, "whole eights of rows are shared");
static_assert(SPLIT <= UNITS, "a unit for every block");

#if CODE == 2
typedef int Sum;
#define SUM(value) "+r"(value)
#define PRODUCT "k32.s32.s8.s8 {"
#define FACTORS "p"
#elif CODE == 1
typedef float Sum;
#define SUM(value) "+f"(value)
#define PRODUCT "k32.f32.e4m3.e4m3 {"
#define FACTORS "p, 1, 1"
#else
typedef float Sum;
#define SUM(value) "+f"(value)
#define PRODUCT "k16.f32." ELEMENT "." ELEMENT " {"
#define FACTORS "p, 1, 1, 0, 0"
#endif
#define PASTE_(a, b) a##b
#define PASTE(a, b) PASTE_(a, b)
#define TEXT_(a) #a
#define TEXT(a) TEXT_(a)

// d (64 x COLUMNS) = a (64 x 32 bytes) @ b (COLUMNS x 32 bytes) transposed; plus d where `add`.
DEVICE void multiply(Sum (&d)[VALUES], u64 a, u64 b, u32 add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n" TEXT(COLUMNS) PRODUCT PASTE(SUM_NAMES_, SIXTEENS) "}, %0, %1, " FACTORS
                 ";\n}"
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
};

// The place in a ring.
struct Ring {
    u32 stage = 0, parity = 0;
    DEVICE void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// What a block takes: items `first`, `first + step`, ..., which are a tile of rows of the weight and SHARE tiles of x,
// those of one tile (and of a group) behind each other; of each, `units` units from `unit` on.
struct Work {
    int share, split, x_items, items, first, step, unit, units;
    DEVICE explicit Work(int tokens) {
        const int rank = blockIdx.x % CLUSTER;
        share = rank % SHARE, split = rank / SHARE;
        x_items = (tokens + TOKENS * SHARE - 1) / (TOKENS * SHARE), items = TILES * x_items;
        first = blockIdx.x / CLUSTER, step = gridDim.x / CLUSTER;
        unit = UNITS * split / SPLIT, units = UNITS * (split + 1) / SPLIT - unit;
    }
    DEVICE int tile(int item) const {
        if (!GROUP) return item / x_items;
        const int group = item / (TILES * GROUP);
        return (item - group * TILES * GROUP) / min(GROUP, x_items - group * GROUP);
    }
    DEVICE int x_row(int item) const {
        int at = item % x_items;
        if (GROUP) {
            const int group = item / (TILES * GROUP);
            at = group * GROUP + (item - group * TILES * GROUP) % min(GROUP, x_items - group * GROUP);
        }
        return (at * SHARE + share) * X_ROWS;
    }
};

// A unit of a tile's rows of the weight, and what else is announced to its barrier.
DEVICE void copy_w(const Shared& shared, const Work& work, const TensorMap* weight, u32 stage, int tile, int unit,
                   u32 more) {
    barrier_expect(shared.full(stage), W_BYTES + more);
    copy_rows(shared.w(stage) + work.share * (W_BYTES / SHARE), weight, shared.full(stage), unit * UNIT,
              tile * TILE + work.share * (TILE / SHARE), u16(((1 << SHARE) - 1) << work.split * SHARE));
}

// By one thread: weights, which are no kernel's result.
DEVICE void copy_weight(const Shared& shared, const Work& work, const TensorMap* weight) {
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
            copy_w(shared, work, weight, ring.stage, tile, work.unit + i, 0);
        }
    }
}

// By another: rows of x.
DEVICE void copy_x(const Shared& shared, const Work& work, const TensorMap* x) {
    wait_for_previous();
    Ring ring;
    for (int item = work.first; item < work.items; item += work.step) {
        const int row = work.x_row(item);
        for (int i = 0; i < work.units; ++i, ring.next()) {
            barrier_wait(shared.empty(ring.stage), ring.parity ^ 1);
            barrier_expect(shared.full_x(ring.stage), X_BYTES);
            copy_2d(shared.x(ring.stage), x, shared.full_x(ring.stage), (work.unit + i) * UNIT, row);
        }
    }
}

// By one thread: both.
DEVICE void copy_both(const Shared& shared, const Work& work, const TensorMap* weight, const TensorMap* x) {
    const int ahead = work.first < work.items ? min(STAGES, work.units) : 0;
    for (int i = 0; i < ahead; ++i)
        copy_w(shared, work, weight, i, work.tile(work.first), work.unit + i, X_BYTES);
    wait_for_previous();
    Ring ring;
    for (int item = work.first; item < work.items; item += work.step) {
        const int tile = work.tile(item), row = work.x_row(item);
        for (int i = 0; i < work.units; ++i, ring.next()) {
            if (item != work.first || i >= ahead) {
                barrier_wait(shared.empty(ring.stage), ring.parity ^ 1);
                copy_w(shared, work, weight, ring.stage, tile, work.unit + i, X_BYTES);
            }
            copy_2d(shared.x(ring.stage), x, shared.full(ring.stage), (work.unit + i) * UNIT, row);
        }
    }
}

DEVICE void pin(int& value) { asm volatile("" : "+r"(value)::"memory"); }
DEVICE void pin(float& value) { asm volatile("" : "+f"(value)::"memory"); }
DEVICE void pin_all(Sum (&d)[M_TILES][VALUES]) {
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int i = 0; i < VALUES; ++i) pin(d[m][i]);
}

DEVICE void compute(const Shared& shared, const Work& work, Finish& finish, const float* x_scales, const float* scales,
                    const float* bias) {
    const int lane = threadIdx.x % 32, group = threadIdx.x / 128;
    const int wg_m = group / WG_N, wg_n = group % WG_N;
    auto release = [&](u32 stage) {
        if (SHARE == 1) {
            if (lane == 0) barrier_arrive(shared.empty(stage));
        } else if (lane < SHARE) {
            arrive_at_block(shared.empty(stage), work.split * SHARE + lane);
        }
    };
    Ring ring;
    for (int item = work.first; item < work.items; item += work.step) {
        finish.begin(group, work.tile(item), work.x_row(item), scales, bias);
        if (item == work.first) wait_for_previous();
        finish.begin_x(x_scales);
        Halves halves;
        halves.load(finish, work.split);
        Sum part[M_TILES][VALUES];
        float sum[PROMOTE ? M_TILES : 1][PROMOTE ? VALUES : 1];
#pragma unroll
        for (int m = 0; m < (PROMOTE ? M_TILES : 0); ++m)
#pragma unroll
            for (int i = 0; i < VALUES; ++i) sum[m][i] = 0.0f;
        constexpr int RUN = PROMOTE ? PROMOTE : UNITS;
        for (int begin = 0; begin < work.units; begin += RUN) {
            u32 last = STAGES;  // stage whose products are under way
            const int end = min(begin + RUN, work.units);
            for (int i = begin; i < end; ++i) {
                barrier_wait(shared.full(ring.stage), ring.parity);
                if (WINDOW) barrier_wait(shared.full_x(ring.stage), ring.parity);
                const u64 a = matrix(shared.x(ring.stage) + wg_m * M_TILES * 64 * ROW_BYTES, 8 * ROW_BYTES, 16);
                const u64 b = matrix(shared.w(ring.stage) + wg_n * COLUMNS * ROW_BYTES, 8 * ROW_BYTES, 16);
                product_fence();
#pragma unroll
                for (int k = 0; k < 4; ++k)
#pragma unroll
                    for (int m = 0; m < M_TILES; ++m)
                        multiply(part[m], a + (m * 64 * ROW_BYTES >> 4) + 2 * k, b + 2 * k, k > 0 || i > begin);
                product_commit();
                product_wait<1>();
                if (last < STAGES) release(last);
                last = ring.stage;
                ring.next();
            }
            product_wait<0>();
            pin_all(part);
            release(last);
#pragma unroll
            for (int m = 0; m < (PROMOTE ? M_TILES : 0); ++m)
#pragma unroll
                for (int i = 0; i < VALUES; ++i) sum[m][i] += part[m][i];
        }
        auto value = [&](int m, int i) { return PROMOTE ? sum[PROMOTE ? m : 0][PROMOTE ? i : 0] : float(part[m][i]); };
        finish.sums_are_there(group);
        if (SPLIT == 1) finish.all(value);
        else halves.meet(finish, work.split, shared.base + SENT_AT + threadIdx.x * 16, shared.sent(), value);
    }
}

// Where sums need more registers than an even share, the copying warp group gives some up.
constexpr bool UNEVEN = GROUPS == 2 && (PROMOTE ? 2 : 1) * M_TILES * VALUES >= 128;
constexpr int COPIERS = UNEVEN ? 128 : 64;
static_assert(GROUPS <= 2 || (PROMOTE ? 2 : 1) * M_TILES * VALUES < 128, "registers for two");

extern "C" __global__ void __launch_bounds__(THREADS + COPIERS, 1) __cluster_dims__(SPLIT * SHARE, 1, 1)
    products(const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x, const u8* packed,
             const float* x_scales, const float* bias, const u16* residual, u16* out, int tokens, float x_scale,
             float result_scale) {
    extern __shared__ unsigned char memory[];
    const Shared shared{(shared_address(memory) + 1023) / 1024 * 1024};
    const Work work(tokens);
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
        if (threadIdx.x == THREADS) WINDOW ? copy_weight(shared, work, &weight) : copy_both(shared, work, &weight, &x);
        if (WINDOW && threadIdx.x == THREADS + 32) copy_x(shared, work, &x);
        __syncwarp();
        if (SPLIT > 1) cluster_wait();
    } else {
        if (UNEVEN) registers_more<240>();
        if (work.first >= work.items) wait_for_previous();
        // Scales lie behind the codes.
        const long long codes = ((long long)HALVES * RESULTS * INNER + 255) / 256 * 256;
        Finish finish;
        finish.vectors = shared.base + SCALES_AT + threadIdx.x / 128 * 2 * VECTOR;
        finish.tokens = tokens, finish.residual = residual, finish.out = out;
        finish.x_scale = x_scale, finish.result_scale = result_scale;
        compute(shared, work, finish, x_scales, reinterpret_cast<const float*>(packed + codes), bias);
    }
    if (SHARE > 1) cluster_sync();  // no block's barriers are arrived at after its end
}
