// Products of up to 16 tokens with a quantised matrix in the layout mma16 (gpu_layouts.py), bound by the memory that
// holds the matrix; compute capability 9.0.
//
// A cluster of CLUSTER blocks takes every WORKERS-th 16 rows of the weight (gated: of gate and up), each block its
// share of the columns. One warp copies codes and another scales into a ring of STAGES; they begin before the kernel
// ahead in the stream has ended, since weights are no kernel's result. SPLITS * PARTS warps multiply: each has units of 128
// columns, as one of SPLITS, of the BATCH panels of one of PARTS. GROUPS of splits take turns in the stages, so that
// some load while others multiply. FINISHERS warps add up the sums of splits, which two batches of panels have
// room for, so that no other warp waits for a batch's end; a cluster's sums meet in the shared memory of one of its
// blocks. A row's sum has one order always.
//
// Codes are not converted: as the low bits of bfloat16 they are subnormal numbers, the code times 2^-133 (e4m3 and
// e2m1, moved to bfloat16's exponent: times 2^-120 and 2^-126), which tensor cores multiply as any other. x, which a
// block has in shared memory, is multiplied by 2^64 so that float32 holds the products; of codes in high nibbles,
// which stay where they are, by 2^60 (of 5 and 6 bits they are moved). What that leaves, no network passes: from
// |x| = 2^63 on even a norm's sum of squares is infinite, and what is below 2^-57 is lost as it would be beside 2^-33.
// The part of a zero point or an offset is the sum of x over the group. nf4's values are looked up, in bfloat16.
//
// Constants: RESULTS results of INNER columns; TOKENS at most (rows of x; up to 16); SPLITS, PARTS, BATCH (16 rows,
// gated: of each half); GROUPS; FINISHERS; STAGES; CLUSTER; WORKERS (clusters); NORM (x passes an RMS norm first); BIAS, RESIDUAL
// (whether there is one); X_ROW, R_ROW (elements from row to row); and decode.cuh's.
#include "decode.cuh"
#include "hopper.cuh"
#include "shared.cuh"
#include "group_scales.cuh"

constexpr int UNIT = 128, UNITS = INNER / UNIT, OWN = UNITS / CLUSTER;
constexpr int PLACES = SPLITS / GROUPS, STEPS = (OWN + PLACES - 1) / PLACES;  // units of a stage, stages of a batch
constexpr int WARPS = SPLITS * PARTS, THREADS = WARPS * 32, TILES = (TOKENS + 7) / 8;
constexpr int HALVES = GATED ? 2 : 1, EACH = PARTS * BATCH, PANELS = RESULTS / 16, ROWS16 = BATCH * HALVES;
constexpr int SCALES = GROUP > 0 ? UNIT / GROUP : 0, SETS = GROUP > 0 ? SCALES : 1;  // of a unit
constexpr bool SHIFTED = ZERO || MIDDLE || CODE == 2;  // signed bytes are taken as 128 more
constexpr bool X_SUMS = SHIFTED || OFFSET;  // x's sums over groups have a part
// Of the next weight every block fetches so many times 16 rows into L2, of each so many bytes at most: not whole panels,
// so that the next kernel reads from L2 and from memory side by side.
constexpr int AHEAD = 4, AHEAD_BYTES = 20 << 10;
// While a ring is filled so many bytes are on their way: enough for the memory, and x is not behind all of the ring.
constexpr u32 MOST_ASKED = 40 << 10;
// Bytes of a unit; of what lies in shared memory, and where.
constexpr u32 CODES = (EIGHT ? 4 : 2) * BLOCK_BYTES, AREAS = SUPER_SCALES ? AREA : SCALES * AREA;
constexpr int COPIERS = AREAS ? 2 : 1;  // warps of which one thread copies
constexpr u32 STAGE_BYTES = EACH * HALVES * PLACES * (CODES + AREAS);
constexpr int ASKED = (MOST_ASKED + STAGE_BYTES - 1) / STAGE_BYTES, WINDOW = ASKED < 2 ? 2 : ASKED;
constexpr u32 X_STRIDE = OWN * UNIT * 2 + 16, TILE_BYTES = 128 * 4, TOKEN_BYTES = TILES * 8 * 4;
constexpr int SLOTS = ((PANELS + WORKERS - 1) / WORKERS + CLUSTER - 1) / CLUSTER;  // panels that a block joins
constexpr u32 X_AT = STAGES * STAGE_BYTES;
constexpr u32 X_SUMS_AT = X_AT + TOKENS * X_STRIDE;
constexpr u32 X_SQUARES_AT = X_SUMS_AT + (X_SUMS ? OWN * SETS * TOKEN_BYTES : 0);
constexpr u32 SQUARES_AT = X_SQUARES_AT + (NORM ? OWN * TOKEN_BYTES : 0);
constexpr u32 SUMS_AT = SQUARES_AT + CLUSTER * TOKEN_BYTES;
constexpr u32 SUMS_BYTES = SPLITS * EACH * HALVES * TILES * TILE_BYTES;  // of a batch
constexpr int SUMS_OF = (PANELS + WORKERS - 1) / WORKERS > EACH ? 2 : 1;  // batches that there is room for
constexpr u32 PARTS_AT = SUMS_AT + SUMS_OF * SUMS_BYTES;
constexpr u32 BARRIERS_AT = PARTS_AT + (CLUSTER > 1 ? CLUSTER * SLOTS * HALVES * TILES * TILE_BYTES : 0);
static_assert(INNER % UNIT == 0 && UNITS % CLUSTER == 0 && RESULTS % 16 == 0, "whole units and panels");
static_assert(SPLITS % GROUPS == 0 && STAGES % GROUPS == 0, "groups of as many splits and stages each");
static_assert(TOKENS <= 8 || TOKENS == 16, "whole tiles");

// What x is multiplied by, of codes in low and in high nibbles; what sums are, to make up for both.
constexpr u32 LOW_FACTOR = CODE == 5 ? 0x3f803f80 : 0x5f805f80;  // 1, 2^64
constexpr u32 HIGH_FACTOR = CODE == 0 ? 0x5d805d80 : LOW_FACTOR;  // 2^60
constexpr float BACK = CODE == 1 ? 0x1p56f : CODE == 4 ? 0x1p62f : CODE == 5 ? 1.0f : 0x1p69f;

DEVICE u32 times(u32 a, u32 b) {
    u32 y;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}

// Of a warp that goes together, one thread.
DEVICE bool elect() {
    u32 mine;
    asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(mine)::"memory");
    return mine;
}
DEVICE void launch_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
DEVICE void prefetch_bytes(const u8* at, int bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(at), "r"(bytes) : "memory");
}

// What a thread did before is not made known: a barrier's first phase is, by its own fence.
DEVICE void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
// Into the shared memory of the cluster's block `rank`, whose barrier counts the bytes.
DEVICE u32 address_in(u32 at, int rank) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
    return there;
}
DEVICE void send(float x, u32 at, u32 barrier, int rank) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(address_in(at, rank)),
                 "f"(x), "r"(address_in(barrier, rank))
                 : "memory");
}
DEVICE void send_4(const float (&x)[4], u32 at, u32 barrier, int rank) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                     address_in(at, rank)),
                 "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "r"(address_in(barrier, rank))
                 : "memory");
}

// A place in the ring: that of the `index`-th stage which is filled.
struct Place {
    u32 stage, parity;
    DEVICE explicit Place(int index) : stage(index % STAGES), parity(index / STAGES & 1) {}
};

struct Block {
    u32 base;
    int rank, cluster, mine;  // panels of the cluster
    DEVICE u32 full(u32 stage) const { return base + BARRIERS_AT + 16 * stage; }
    DEVICE u32 empty(u32 stage) const { return full(stage) + 8; }
    // Of the sums of batch b: there, and taken. Every thread arrives that has written, or read.
    DEVICE u32 summed(int b) const { return base + BARRIERS_AT + 16 * STAGES + 16 * (b % 2); }
    DEVICE u32 taken(int b) const { return summed(b) + 8; }
    // Parts of sums, and of squares, of all blocks of the cluster are there.
    DEVICE u32 parts() const { return summed(2) + 32; }
    DEVICE int panel(int index) const { return cluster + index * WORKERS; }
    DEVICE int batches() const { return (mine + EACH - 1) / EACH; }
};

// By a warp, of which one thread copies: codes, or scale areas, of UNIT_BYTES a unit, those of panel 0 from `source` on,
// to `target` of a stage. What a copy takes must be in uniform registers (the warp's number is, by a shuffle, and
// `elect` says that one thread goes on): else each takes 150 cycles, and the memory waits for them.
template <u32 UNIT_BYTES>
DEVICE void copy(const Block& block, const u8* source, u32 target) {
    source += block.rank * (OWN * UNIT_BYTES);
    int filled = 0;
    for (int b = 0; b < block.batches(); ++b) {
        const int panels = min(EACH, block.mine - b * EACH);
        const u8* from = source + block.panel(b * EACH) * PANEL_BYTES;
#pragma unroll 1
        for (int s = 0; s < STEPS; ++s, ++filled, from += PLACES * UNIT_BYTES) {
            const Place place(filled);
            if (filled >= STAGES)
                barrier_wait(block.empty(place.stage), place.parity ^ 1);
            else if (filled >= WINDOW)
                barrier_wait(block.full(filled - WINDOW), 0);
            if (elect()) {
                const u32 bytes = (OWN % PLACES == 0 ? PLACES : min(PLACES, OWN - s * PLACES)) * UNIT_BYTES;
                barrier_expect(block.full(place.stage), panels * HALVES * bytes);
#pragma unroll
                for (int i = 0; i < EACH * HALVES; ++i)
                    if (i < panels * HALVES)
                        copy_bytes(block.base + place.stage * STAGE_BYTES + target + i * PLACES * UNIT_BYTES,
                                   from + (i / HALVES * WORKERS + i % HALVES * PANELS) * PANEL_BYTES, bytes,
                                   block.full(place.stage));
            }
            __syncwarp();
        }
    }
}

#include "packed_unit.cuh"
#include "packed_x.cuh"

DEVICE void compute(const Block& block, int warp) {
    const int split = warp % SPLITS, part = warp / SPLITS, lane = threadIdx.x % 32;
    const int group = split / PLACES, place = split % PLACES;
    for (int b = 0; b < block.batches(); ++b) {
        float d[ROWS16][TILES][4];
#pragma unroll
        for (int i = 0; i < ROWS16; ++i)
#pragma unroll
            for (int t = 0; t < TILES; ++t) d[i][t][0] = d[i][t][1] = d[i][t][2] = d[i][t][3] = 0.0f;
        // A place of the ring is always the same group's, which sees all of its phases.
        for (int s = (group + (GROUPS - 1) * b * STEPS) % GROUPS; s < STEPS; s += GROUPS) {
            const Place at(b * STEPS + s);
            barrier_wait(block.full(at.stage), at.parity);
            const int index = s * PLACES + place;
            if (OWN % PLACES == 0 || index < OWN) unit(block, at.stage, place, part, index, d);
            __syncwarp();
            if (lane == 0) barrier_arrive(block.empty(at.stage));
        }
        if (b > 1) barrier_wait(block.taken(b), (b / 2 & 1) ^ 1);
        const u32 own = block.base + SUMS_AT + b % 2 * SUMS_BYTES +
                        (split * EACH * HALVES + part * ROWS16) * (TILES * TILE_BYTES) + lane * 16;
#pragma unroll
        for (int i = 0; i < ROWS16; ++i)
#pragma unroll
            for (int t = 0; t < TILES; ++t)
                put_4(own + (i * TILES + t) * TILE_BYTES, __float_as_uint(d[i][t][0]), __float_as_uint(d[i][t][1]),
                      __float_as_uint(d[i][t][2]), __float_as_uint(d[i][t][3]));
        barrier_arrive(block.summed(b));
    }
}

#include "packed_sums.cuh"

extern "C" __global__ void __launch_bounds__(THREADS + 32 * (COPIERS + FINISHERS), 1)
#if CLUSTER > 1
    __cluster_dims__(CLUSTER, 1, 1)
#endif
        packed(const u8* __restrict__ weight, const u16* __restrict__ x, const float* __restrict__ bias,
               const u16* __restrict__ residual, const float* __restrict__ norm, u16* __restrict__ out, int tokens,
               float eps, const u8* ahead, int ahead_bytes, int ahead_count) {
    extern __shared__ __align__(128) u8 memory[];
    const int cluster = blockIdx.x / CLUSTER;
    const Block block{shared_address(memory), int(blockIdx.x % CLUSTER), cluster, (PANELS - cluster + WORKERS - 1) / WORKERS};
    if (threadIdx.x == THREADS) {
        for (u32 i = 0; i < STAGES; ++i) {
            barrier_init(block.full(i), COPIERS);
            barrier_init(block.empty(i), PLACES * PARTS);
        }
        for (int b = 0; b < 2; ++b) {
            barrier_init(block.summed(b), THREADS);
            barrier_init(block.taken(b), 32 * FINISHERS);
        }
        if (CLUSTER > 1) barrier_init(block.parts(), 1);
        barrier_init_fence();
    }
    __syncthreads();
    if (CLUSTER > 1) cluster_arrive_relaxed();
    const Results results{weight, bias, residual, out, tokens, eps};
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (warp < WARPS) {
        if (TOKENS == 1)
            prepare_one(block, x, norm);
        else
            prepare(block, x, norm, tokens);
        named_sync(1, THREADS);
        if (CLUSTER > 1) cluster_wait();
        if (NORM) add_squares(block);
        compute(block, warp);
        if (CLUSTER > 1) join(block, results);
    } else if (warp < WARPS + COPIERS) {
        if (warp == WARPS) {
            if (elect()) {
                launch_next();
                if (CLUSTER > 1) barrier_expect(block.parts(), part_bytes(block, tokens));
            }
            __syncwarp();
            copy<CODES>(block, weight, 0);
            if (ahead_count) {
                const Place last(max(0, block.batches() * STEPS - 1));
                barrier_wait(block.full(last.stage), last.parity);  // else it would be in this weight's way
                if (elect())
                    for (int i = blockIdx.x; i < min(ahead_count, AHEAD * WORKERS * CLUSTER); i += WORKERS * CLUSTER)
                        prefetch_bytes(ahead + (long long)i * ahead_bytes, min(ahead_bytes, AHEAD_BYTES));
            }
        } else if (AREAS) {
            copy<AREAS>(block, weight + AREAS_AT, EACH * HALVES * PLACES * CODES);
        }
        __syncwarp();
        if (CLUSTER > 1) cluster_wait();
        wait_for_previous();
    } else {
        wait_for_previous();
        finish_batches(block, results);
    }
}
