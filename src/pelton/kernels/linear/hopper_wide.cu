// Products of some dozens to hundreds of tokens with a quantised matrix in the layout mma16 (gpu_layouts.py), x as it
// is; compute capability 9.0.
//
// A warp has a panel of 16 rows, four of them, a warp group, the 64 rows of an asynchronous product. Each warp copies
// its own codes and scales into shared memory, DEPTH - 1 units of 128 columns ahead, every lane the codes that it decodes:
// nothing but the warp waits for them. It begins before the kernel ahead in the stream has ended. x
// comes through a ring of STAGES times 64 columns that one warp fills by tensor copies. Decoded and scaled (by a sum of two
// bfloat16, exact to 16 bits) in registers, the weight is multiplied from there, while the group decodes the next
// columns and other groups do both.
//
// A block has EACH panels of results, of which ROW_GROUPS warp groups take a round at a time. Sums over columns are
// shared by SPLITS groups that take units in turn, and by CLUSTER blocks that take runs of them; they are added up in
// shared memory, a block's share of the tokens by each, in one order, where bias, activation and residual follow.
// Where a group has whole sums of gate and up, it needs no other: it puts them, rounded, where it can read them token by
// token, and goes on; copying warps that have nothing to copy finish them, but for those of the last round. Of
// HALF_STRIP, two blocks have 64 rows more, each of half of the tokens.
//
// Constants: RESULTS results of INNER columns; TOKENS at most (32, 64, 128, 256), a tile of them a blockIdx.y;
// ROW_GROUPS; SPLITS; CLUSTER; HALF_STRIP; EACH; STAGES; DEPTH; STEPS (of 16 columns that are multiplied while others are
// decoded); SUMS; BIAS, RESIDUAL (whether there is one); R_ROW (elements from row to row of the residual); and
// decode.cuh's.
#include "hopper.cuh"
#include "decode.cuh"
#include "shared.cuh"

constexpr int UNIT = 128, ROW_BYTES = 128;
constexpr int HALVES = GATED ? 2 : 1, PANELS = RESULTS / 16, GROUPS = ROW_GROUPS * SPLITS, THREADS = GROUPS * 128;
constexpr int STRIP = 4 / HALVES;                   // panels of results of a warp group
constexpr int ROWS = ROW_GROUPS * 64, ROUND = ROW_GROUPS * STRIP;  // panels of results of a round
constexpr int ROUNDS = (EACH + HALF_STRIP * STRIP + ROUND - 1) / ROUND, UNITS = INNER / UNIT;
constexpr int VALUES = TOKENS / 2;                  // of a thread in a tile
constexpr int LOADS = EIGHT ? 4 : 2;                // of 16 bytes of codes in a unit
constexpr int SCALES = GROUP > 0 ? UNIT / GROUP : 0;
constexpr int WORDS = SCALES > 2 ? SCALES / 2 : 1;  // of a lane for a unit's scales: 16 rows of two groups each
// Codes that are decoded to less than they are: their scales make up for it, sums for what scales have no room for.
constexpr bool SMALL = !SUMS && GROUP > 0 && (CODE == 1 || CODE == 4);
constexpr float SCALED = !SMALL ? 1.0f : BYTE_SCALES == 1 ? 0x1p117f : CODE == 1 ? 0x1p56f : 0x1p62f;
constexpr float SUMMED = !SMALL ? 1.0f : SMALL_INVERSE / SCALED;
constexpr bool SHORT = BYTE_SCALES > 0;             // scales that bfloat16 holds
constexpr u32 UNIT_CODES = LOADS * 512, UNIT_AREA = SCALES * AREA;
constexpr bool STAGED = GATED && SPLITS == 1 && CLUSTER == 1;  // sums have a place of their own
constexpr u32 X_BYTES = TOKENS * ROW_BYTES, SUMS_BYTES = GROUPS * 64 * TOKENS * 4;
constexpr u32 SLOT = UNIT_CODES + UNIT_AREA;        // of a warp, for a unit
// A round's sums lie behind x, or where it was.
constexpr u32 SLOTS_AT = STAGED ? (STAGES + GROUPS) * X_BYTES : STAGES * X_BYTES > SUMS_BYTES ? STAGES * X_BYTES : SUMS_BYTES;
constexpr u32 BARRIERS_AT = SLOTS_AT + GROUPS * 4 * DEPTH * SLOT;
static_assert(INNER % UNIT == 0 && RESULTS % 16 == 0, "whole units");
static_assert(HALVES * PANELS * PANEL_BYTES >> 32 == 0, "offsets of 32 bits");
static_assert(CLUSTER == 1 || ROUNDS == 1, "a cluster's blocks read each other's sums once");
static_assert(STAGES % 2 == 0 && STAGES / 2 > SPLITS, "a split's next unit comes before it gives the last one's stage back");
static_assert(SPLITS == 1 || ROUNDS == 1, "splits take turns in one round");
static_assert(GROUP == 0 || GROUP == 16 || GROUP == 32 || GROUP == 64 || GROUP % UNIT == 0, "scales of whole quarters");
static_assert(!SUMS || GROUP == UNIT, "a unit's sum has one scale");
static_assert(TOKENS % CLUSTER == 0, "tokens of a block");
static_assert(!HALF_STRIP || (CLUSTER == 1 && SPLITS == 1 && !SUMS && EACH % STRIP == 0), "two have a strip more");

#include "wide_products.cuh"

DEVICE void launch_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// 16 bytes of global memory into shared memory, read once.
DEVICE void copy_chunk(u32 target, const void* source) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
}
DEVICE void copies_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int PENDING>
DEVICE void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Keeps the compiler from using these before this point.
DEVICE void pin(uint4& v) { asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)::"memory"); }

// Four sums, of any block of the cluster.
DEVICE float4 load_sums(u32 at) {
    float4 v;
    if (CLUSTER == 1)
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(at) : "memory");
    else
        asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(at) : "memory");
    return v;
}
// As cluster_arrive, where nothing that was written must be seen: no fence.
DEVICE void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
DEVICE u32 place_of(u32 at, u32 rank) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
    return there;
}

#include "wide_copies.cuh"
#include "wide_unit.cuh"
#include "wide_finish.cuh"

// Where sums need more registers than an even share, the copying warps give some up; of two groups the rest of
// them finish rounds.
constexpr bool UNEVEN = (GROUPS == 4 && (SUMS || VALUES > 32)) || VALUES > 64;
constexpr int FINISHERS = STAGED && VALUES > 64 && ROUNDS > 1 ? 96 : 0;
static_assert(!UNEVEN || GROUPS == 4 || GROUPS == 2, "registers for four, or for two");
// Named barriers of a group: of its own; its sums are there; they are taken.
DEVICE u32 own(int group) { return 2 + group; }
DEVICE u32 there(int group) { return 6 + group; }
DEVICE u32 taken(int group) { return 10 + group; }

DEVICE void finish_rounds(const Shared& shared, const Operands& o) {
    for (int round = 0; round + 1 < ROUNDS; ++round)
        for (int group = 0; group < GROUPS; ++group) {
            const Strip strip(round, group);
            if (strip.panels <= 0) continue;
            named_sync(there(group), 128 + FINISHERS);
            finish_strip<96>(shared.staged(group), strip, o, threadIdx.x - (THREADS + 32));
            named_arrive(taken(group), 128 + FINISHERS);
        }
}

// Of the group of this thread.
DEVICE void end_round(const Shared& shared, int round, int group, const Strip& strip, const Sums& sums, const Operands& o) {
    if (round > 0) {  // the last round's are not needed any more
        if (FINISHERS) named_sync(taken(group), 128 + FINISHERS);
        else named_sync(own(group), 128);
    }
    put_strip(shared.staged(group), strip, threadIdx.x / 32 % 4, sums.whole, o);
    if (FINISHERS && round + 1 < ROUNDS) {
        named_arrive(there(group), 128 + FINISHERS);
    } else {
        named_sync(own(group), 128);
        finish_strip<128>(shared.staged(group), strip, o, threadIdx.x % 128);
    }
}

// Units first to last of the columns, by the groups that have a part in them.
DEVICE void compute(const Shared& shared, int first, int last, const Operands& o) {
    // By a shuffle the compiler knows that a warp's threads have the same.
    const int number = __shfl_sync(~0u, threadIdx.x / 32, 0), group = number / 4, split = SPLITS == 1 ? 0 : group / ROW_GROUPS;
    const int warp = group % ROW_GROUPS * 4 + number % 4;
    const int count = (last - first - split + SPLITS - 1) / SPLITS;
    const u32 slots = shared.slots(number);
    Ahead ahead{o.weight, slots, warp, first + split, count};
    if (count > 0) ahead.begin_round();
#pragma unroll
    for (int i = 0; i < DEPTH - 1; ++i) ahead.copy();
    u32 slot = 0;
    Loaded loaded;
    if (EARLY) loaded.load(slots);
    wait_for_previous();
    Ring ring;
    for (int i = 0; i < split; ++i) ring.next();
    for (int round = 0; round < ROUNDS; ++round) {
        Sums sums;
#pragma unroll
        for (int i = 0; i < VALUES; ++i) sums.whole[i] = sums.part[i] = 0.0f;
        sums.scale[0] = sums.scale[1] = 0.0f;
        const Strip strip(round, warp / 4);
        const bool has_part = strip.panels > 0;
        u32 before = STAGES;  // none
        if (has_part) {
            for (int i = 0; i < count; ++i) {
                const u32 next = slot + 1 == DEPTH ? 0 : slot + 1, from = slots + slot * SLOT, to = slots + next * SLOT;
                if (HALF_STRIP && strip.half) multiply<HALF_STRIP>(shared, ring, before, sums, loaded, from, to, ahead);
                else multiply<0>(shared, ring, before, sums, loaded, from, to, ahead);
                before = ring.stage;
                slot = next;
#pragma unroll
                for (int k = 0; k < SPLITS; ++k) ring.next();
            }
            product_wait<0>();
            pin(sums.whole);
            if (SUMS) pin(sums.part);
            release_last(shared, before);
            sums.add_part();
        } else {
            for (int i = 0; i < count; ++i) {
#pragma unroll
                for (int part = 0; part < 2; ++part) {
                    shared.wait(ring.stage + part, ring.parity);
                    shared.release(ring.stage + part);
                }
                for (int k = 0; k < SPLITS; ++k) ring.next();
            }
        }
        if (STAGED) {
            if (has_part) end_round(shared, round, group, strip, sums, o);
            continue;
        }
        // All have read x, which makes room for the sums.
        named_sync(1, THREADS);
        if (has_part) put_sums(shared.sums() + split * (ROWS * TOKENS * 4), warp, sums.whole, strip.half);
        if (CLUSTER > 1) {
            cluster_arrive();
            cluster_wait();
        } else {
            named_sync(1, THREADS);
        }
        finish(shared.sums(), o, round);
        if (round + 1 < ROUNDS) {
            fence_async();
            __syncwarp();
            shared.arrive(shared.drained());
        }
        if (CLUSTER > 1) {  // a block's shared memory stays until all have read it
            cluster_arrive_relaxed();
            cluster_wait();
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS + (UNEVEN ? 128 : 32), 1) __cluster_dims__(CLUSTER, 1, 1)
    wide(const u8* weight, const __grid_constant__ TensorMap x_map, const float* bias, const u16* residual, u16* out,
         int tokens) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const Shared shared{(shared_address(memory) + 1023) / 1024 * 1024};
    if (threadIdx.x == THREADS) {
        prefetch_map(&x_map);
        for (u32 i = 0; i < STAGES; ++i) {
            barrier_init(shared.full(i), 1);
            barrier_init(shared.empty(i), ROW_GROUPS * 4);
        }
        barrier_init(shared.drained(), GROUPS * 4);
        for (u32 i = 0; i < 2; ++i) barrier_init(shared.nothing() + 16 * i, 1);
        barrier_init_fence();
    }
    __syncthreads();
    launch_next();
    const Operands o{weight, tokens, bias, residual, out};
    const int rank = blockIdx.x % CLUSTER;
    const int first = rank * UNITS / CLUSTER, last = (rank + 1) * UNITS / CLUSTER;
    if (__shfl_sync(~0u, threadIdx.x / 128, 0) >= GROUPS) {
        if (UNEVEN) registers_less<FINISHERS ? 40 : 24>();
        if (FINISHERS && threadIdx.x >= THREADS + 32) finish_rounds(shared, o);
        if (threadIdx.x == THREADS) {
            wait_for_previous();
            copy_x(shared, &x_map, first, last);
        }
        if (CLUSTER > 1) {  // all threads of a cluster count
            __syncwarp();
            cluster_arrive_relaxed();
            cluster_wait();
            cluster_arrive_relaxed();
            cluster_wait();
        }
    } else {
        if (UNEVEN) registers_more<GROUPS == 4 ? 112 : 232>();
        compute(shared, first, last, o);
    }
}
