// Products of some dozens to hundreds of tokens with a quantised matrix in the layout mma16 (gpu_layouts.py), x as it
// is; compute capability 9.0.
//
// A warp has a panel of 16 rows, four of them, a warp group, the 64 rows of an asynchronous product. Each warp copies
// its own codes and scales into shared memory, DEPTH - 1 units of 128 columns ahead, every lane the codes that it decodes:
// nothing but the warp waits for them. It begins before the kernel ahead in the stream has ended. x
// comes through a ring of STAGES times 64 columns that one warp fills by tensor copies. Decoded and scaled (by a sum of two
// bfloat16, exact to 16 bits, or in float32) in registers, the weight is multiplied from there, while the group decodes the next
// columns and other groups do both.
//
// A block has EACH panels of results, of which ROW_GROUPS warp groups take a round at a time. Sums over columns are
// shared by SPLITS groups that take units in turn, and by CLUSTER blocks that take runs of them: each group, and before
// it each block, sends what it has of others' tokens to them, and adds up its own in one order. Where a group has whole
// sums, it needs no other. Results are put, rounded, where they can be read token by token; copying warps that have
// nothing to copy finish them, but for those of the last round, while their group goes on. Of HALF_STRIP, two blocks (or
// clusters) have 64 rows more, each of half of the tokens.
//
// Constants: RESULTS results of INNER columns; TOKENS at most (32, 64, 128, 256), a tile of them a blockIdx.y;
// ROW_GROUPS; SPLITS; CLUSTER; HALF_STRIP; EACH; STAGES; DEPTH; STEPS (of 16 columns that are multiplied while others are
// decoded); SUMS; TABLED (whether scales pass through a table of the warp); ONE_AREA (whether a warp's slots share one place
// for scales); BIAS, RESIDUAL (whether there is one); R_ROW (elements from row to row of the residual); and
// decode.cuh's.
#include "hopper.cuh"
#include "decode.cuh"
#include "shared.cuh"
#include "group_scales.cuh"

constexpr int UNIT = 128, ROW_BYTES = 128;
constexpr int HALVES = GATED ? 2 : 1, PANELS = RESULTS / 16, GROUPS = ROW_GROUPS * SPLITS, THREADS = GROUPS * 128;
constexpr int STRIP = 4 / HALVES;                   // panels of results of a warp group
constexpr int ROUND = ROW_GROUPS * STRIP;           // panels of results of a round
constexpr int ROUNDS = (EACH + HALF_STRIP * STRIP + ROUND - 1) / ROUND, UNITS = INNER / UNIT;
constexpr int VALUES = TOKENS / 2;                  // of a thread in a tile
constexpr int LOADS = EIGHT ? 4 : 2;                // of 16 bytes of a lane's codes in a unit, upper bits apart
constexpr int SCALES = GROUP > 0 ? UNIT / GROUP : 0;
constexpr int WORDS = SCALES > 2 ? SCALES / 2 : 1;  // of a lane for a unit's scales: 16 rows of two groups each
// Codes that are decoded to less than they are: their scales make up for it, sums for what scales have no room for.
constexpr bool SMALL = !SUMS && GROUP > 0 && (CODE == 1 || CODE == 4);
constexpr float SCALED = !SMALL ? 1.0f : BYTE_SCALES == 1 ? 0x1p117f : CODE == 1 ? 0x1p56f : 0x1p62f;
constexpr float SUMMED = !SMALL ? 1.0f : SMALL_INVERSE / SCALED;
constexpr bool SHORT = BYTE_SCALES > 0;             // scales that bfloat16 holds
constexpr u32 UNIT_CODES = LOADS * BLOCK_BYTES, UNIT_AREA = SUPER_SCALES ? AREA : SCALES * AREA;
constexpr bool WHOLE = SPLITS == 1 && CLUSTER == 1;  // sums: they have a place of their own
constexpr u32 X_BYTES = TOKENS * ROW_BYTES;
constexpr u32 SLOT = UNIT_CODES + (ONE_AREA ? 0 : UNIT_AREA);        // of a warp, for a unit
constexpr u32 TABLE = TABLED ? SCALES / 2 * 256 : 0;                 // of a warp: 8 bytes of each row and group
constexpr u32 SLOTS = DEPTH * SLOT + (ONE_AREA ? UNIT_AREA : 0), OF_WARP = SLOTS + TABLE;
constexpr int EIGHTS = TOKENS / 8;
constexpr u32 PART = 128 * 16;                      // of a group's sums of eight tokens, in bytes
// Parts of sums lie where x and codes were.
constexpr u32 PARTS_BYTES = WHOLE ? 0 : ((SPLITS > 1 ? GROUPS : 0) + (CLUSTER > 1 ? ROW_GROUPS : 0)) * EIGHTS * PART;
constexpr u32 SLOTS_AT = (STAGES + (WHOLE ? GROUPS : 0)) * X_BYTES, USED = SLOTS_AT + GROUPS * 4 * OF_WARP;
constexpr u32 BARRIERS_AT = USED > PARTS_BYTES ? USED : PARTS_BYTES;
static_assert(INNER % UNIT == 0 && RESULTS % 16 == 0, "whole units");
static_assert(HALVES * PANELS * PANEL_BYTES >> 32 == 0, "offsets of 32 bits");
static_assert(STAGES % 2 == 0 && STAGES / 2 > SPLITS, "a split's next unit comes before it gives the last one's stage back");
static_assert(WHOLE || ROUNDS == 1, "parts of sums are added up once");
static_assert(GROUP == 0 || GROUP == 16 || GROUP == 32 || GROUP == 64 || GROUP % UNIT == 0, "scales of whole quarters");
static_assert(!TABLED || (SCALES > 1 && (CODE == 3 || (!ZERO && !OFFSET))), "two words of a row and group");
static_assert(!ONE_AREA || (DEPTH == 2 && GROUPS < 4), "scales are read before the next are copied");
static_assert(!SUMS || GROUP == UNIT, "a unit's sum has one scale");
static_assert(EIGHTS % CLUSTER == 0 && (!HALF_STRIP || EIGHTS / 2 % CLUSTER == 0), "whole eights of tokens of a block");
static_assert(!HALF_STRIP || (SPLITS == 1 && !SUMS && EACH % STRIP == 0), "two have a strip more");
static_assert(!GATED || !RESIDUAL, "gate and up have none");

#include "wide_products.cuh"

// Read once: threadIdx would be at every use.
DEVICE int this_lane() {
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}
DEVICE void launch_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// 16 bytes of global memory into shared memory, read once.
DEVICE void copy_chunk(u32 target, const void* source) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
}
DEVICE void copy_chunk_if(bool wanted, u32 target, const void* source) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n@p cp.async.cg.shared.global.L2::256B [%0], [%1], 16;\n}" ::"r"(target),
                 "l"(source), "r"(u32(wanted))
                 : "memory");
}
DEVICE void copies_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int PENDING>
DEVICE void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

DEVICE void put_2(u32 at, u32 x, u32 y) { asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(at), "r"(x), "r"(y) : "memory"); }

// Keeps the compiler from using these before this point.
DEVICE void pin(uint4& v) { asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)::"memory"); }

// As cluster_arrive, where nothing that was written must be seen: no fence.
DEVICE void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
DEVICE u32 place_of(u32 at, u32 rank) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
    return there;
}
// To another block, whose barrier counts the bytes.
DEVICE void send_4(const float (&v)[4], u32 there, u32 barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                     there),
                 "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "r"(barrier)
                 : "memory");
}
// Named barriers: of the splits of a row group; of a group: alone; its sums are there; they are taken.
DEVICE u32 own(int row_group) { return 2 + row_group; }
DEVICE u32 alone(int group) { return WHOLE ? 2 + group : 6 + group; }
DEVICE u32 there(int group) { return 6 + group; }
DEVICE u32 taken(int group) { return 10 + group; }

#include "wide_copies.cuh"
#include "wide_unit.cuh"
#include "wide_finish.cuh"

// Where sums need more registers than an even share, the copying warps give some up; of two groups the rest of
// them finish rounds.
constexpr bool UNEVEN = (GROUPS == 4 && (SUMS || VALUES > 32)) || VALUES > 64;
constexpr int FINISHERS = WHOLE && VALUES > 64 && ROUNDS > 1 ? 96 : 0;
static_assert(!UNEVEN || GROUPS == 4 || GROUPS == 2, "registers for four, or for two");

DEVICE void finish_rounds(const Shared& shared, const Operands& o) {
    for (int round = 0; round + 1 < ROUNDS; ++round)
        for (int group = 0; group < GROUPS; ++group) {
            const Strip strip(round, group);
            if (strip.panels <= 0) continue;
            named_sync(there(group), 128 + FINISHERS);
            write_strip<96>(shared.staged(group), strip, strip.first_token(), strip.tokens(), o, threadIdx.x - (THREADS + 32));
            named_arrive(taken(group), 128 + FINISHERS);
        }
}

// Whole sums of the group of this thread.
template <int N>
DEVICE void end_round(const Shared& shared, int round, int group, const Strip& strip, const float (&d)[N], const Operands& o) {
    const bool others_write = FINISHERS && round + 1 < ROUNDS;
    if (round > 0) {  // the last round's are not needed any more
        if (FINISHERS) named_sync(taken(group), 128 + FINISHERS);
        else named_sync(alone(group), 128);
    }
    put_strip(shared.staged(group), strip, threadIdx.x / 32 % 4, d, o);
    if (others_write) {
        named_arrive(there(group), 128 + FINISHERS);
    } else {
        named_sync(alone(group), 128);
        write_strip<128>(shared.staged(group), strip, strip.first_token(), strip.tokens(), o, threadIdx.x % 128);
    }
}

// Units first to last of the columns, by the groups that have a part in them.
DEVICE void compute(const Shared& shared, int first, int last, const Operands& o) {
    // By a shuffle the compiler knows that a warp's threads have the same.
    const int number = __shfl_sync(~0u, threadIdx.x / 32, 0), group = number / 4, split = SPLITS == 1 ? 0 : group / ROW_GROUPS;
    const int warp = group % ROW_GROUPS * 4 + number % 4;
    const int count = (last - first - split + SPLITS - 1) / SPLITS;
    const u32 slots = shared.slots(number);
    Ahead ahead{o.weight, slots, shared.lane, warp, first + split, count};
    if (count > 0) ahead.begin_round();
#pragma unroll
    for (int i = 0; i < DEPTH - 1; ++i) ahead.copy();
    u32 slot = 0;
    Loaded loaded{slots + DEPTH * SLOT, slots + SLOTS};
    if (CODE == 5 && EARLY) keep(loaded.nf4, o.tokens >> 31);
    if (EARLY) loaded.load(slots, shared.lane);
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
                ring.next<SPLITS>();
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
                ring.next<SPLITS>();
            }
        }
        if (!WHOLE) {
            // All of the block have read x, which makes room for sums; the cluster's others are waited for later.
            if (CLUSTER > 1) cluster_arrive_relaxed();
            if (SPLITS > 1) named_sync(1, THREADS);
            if (!has_part && CLUSTER > 1) cluster_wait();
        }
        if (!has_part) continue;
        auto end = [&](const auto& d) {
            if constexpr (WHOLE) end_round(shared, round, group, strip, d, o);
            else share(shared, strip, group, d, o);
        };
        if (HALF_STRIP && strip.half) end(sums_of<HALF_STRIP>(sums.whole));
        else end(sums.whole);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS + (UNEVEN ? 128 : 32), 1) __cluster_dims__(CLUSTER, 1, 1)
    wide(const u8* weight, const __grid_constant__ TensorMap x_map, const float* bias, const u16* residual, u16* out,
         int tokens) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const Shared shared{shared_address(memory), this_lane()};  // aligned, as nothing lies before it
    if (threadIdx.x == THREADS) {
        prefetch_map(&x_map);
        for (u32 i = 0; i < STAGES; ++i) {
            barrier_init(shared.full(i), 1);
            barrier_init(shared.empty(i), ROW_GROUPS * 4);
        }
        for (u32 i = 0; i < 2; ++i) barrier_init(shared.nothing() + 16 * i, 1);
        for (int i = 0; i < ROW_GROUPS && CLUSTER > 1; ++i) barrier_init(shared.sent(i), 1);
        barrier_init_fence();
        for (int i = 0; i < ROW_GROUPS && CLUSTER > 1; ++i) {
            const Strip strip(0, i);
            const u32 eights = strip.panels > 0 ? strip.tokens() / 8 / CLUSTER : 0;
            barrier_expect(shared.sent(i), (CLUSTER - 1) * eights * PART);
        }
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
        // Others send once the thread that made the barriers has arrived. After its copies, which others' arrivals wait for:
        // under compute-sanitizer's racecheck an arrival waits for all.
        if (CLUSTER > 1) {
            __syncwarp();
            cluster_arrive();
            cluster_wait();
        }
    } else {
        if (UNEVEN) registers_more<GROUPS == 4 ? 112 : 232>();
        compute(shared, first, last, o);
    }
}
