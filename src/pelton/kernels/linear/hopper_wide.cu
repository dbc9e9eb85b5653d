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

// d (64 x n) = a (64 x 16, registers) @ b (n x 16) transposed, plus d where ADD; `b`: the low half of its description (`matrix` in
// hopper.cuh), as the high one is the same everywhere: 1024 bytes from eight rows to the next, swizzled.
#define DESCRIBED(low, add) "{\n.reg .b64 b;\n.reg .pred p;\nmov.b64 b, {" low ", 0x40000040};\nsetp.ne.u32 p, " add ", 0;\n"
#define NAMES128                                                                                             \
    NAMES64                                                                                                  \
    ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89," \
    "%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112," \
    "%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define NAMES16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
template <int ADD>
DEVICE void product(float (&d)[16], const u32 (&a)[4], u32 b) {
    asm volatile(DESCRIBED("%20", "%21")
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {" NAMES16 "}, {%16,%17,%18,%19}, b, p, 1, 1, 0;\n}"
                 : OUT8(d, 0), OUT8(d, 8)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(ADD));
}
template <int ADD>
DEVICE void product(float (&d)[32], const u32 (&a)[4], u32 b) {
    asm volatile(DESCRIBED("%36", "%37")
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" NAMES32 "}, {%32,%33,%34,%35}, b, p, 1, 1, 0;\n}"
                 : OUT32(d, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(ADD));
}
template <int ADD>
DEVICE void product(float (&d)[64], const u32 (&a)[4], u32 b) {
    asm volatile(DESCRIBED("%68", "%69")
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" NAMES64 "}, {%64,%65,%66,%67}, b, p, 1, 1, 0;\n}"
                 : OUT32(d, 0), OUT32(d, 32)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(ADD));
}
template <int ADD>
DEVICE void product(float (&d)[128], const u32 (&a)[4], u32 b) {
    asm volatile(DESCRIBED("%132", "%133")
                 "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" NAMES128 "}, {%128,%129,%130,%131}, b, p, 1, 1, 0;\n}"
                 : OUT32(d, 0), OUT32(d, 32), OUT32(d, 64), OUT32(d, 96)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(ADD));
}

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

struct Shared {
    u32 base;
    DEVICE u32 full(u32 stage) const { return base + BARRIERS_AT + 16 * stage; }
    DEVICE u32 empty(u32 stage) const { return full(stage) + 8; }
    DEVICE u32 x(u32 stage) const { return base + stage * X_BYTES; }
    DEVICE u32 sums() const { return base; }
    DEVICE u32 staged(u32 group) const { return base + (STAGES + group) * X_BYTES; }
    DEVICE u32 slots(u32 warp) const { return base + SLOTS_AT + warp * (DEPTH * SLOT); }

    DEVICE u32 drained() const { return full(STAGES); }  // of the sums that lie where x will
    DEVICE u32 nothing() const { return empty(STAGES); }  // where two stages would follow, for arrivals that count for none

    // Until x is there. What lay there before may be another split's, and not even have come yet: a barrier alone
    // does not tell the turn before last from this one.
    DEVICE void wait(u32 stage, u32 parity) const {
        if (SPLITS > 1) barrier_wait(empty(stage), parity ^ 1);
        barrier_wait(full(stage), parity);
    }

    // By a warp.
    DEVICE void arrive(u32 barrier) const {
        if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
    }
    DEVICE void release(u32 stage) const { arrive(empty(stage)); }
};

// The place in a ring: of a unit, two stages.
struct Ring {
    u32 stage = 0, parity = 0;
    DEVICE void next() {
        if ((stage += 2) == STAGES) stage = 0, parity ^= 1;
    }
};

// What a warp group multiplies in a round: panels of results, none where there are no more; `half`: of half of the
// tokens.
struct Strip {
    int panel, panels;
    bool half;
    DEVICE Strip(int round, int group) {
        const int index = round * ROUND + group * STRIP;  // of the block's panels
        half = HALF_STRIP && index == EACH;
        if (!HALF_STRIP) panel = blockIdx.x / CLUSTER * EACH + index;
        else panel = blockIdx.x / 2 * (2 * EACH + STRIP) + (half ? 2 * EACH : blockIdx.x % 2 * EACH + index);
        panels = min(min(STRIP, half ? STRIP : EACH - index), PANELS - panel);
    }
    // The panel of the weight that a warp of the group has; the last more than once.
    DEVICE int of_warp(int warp) const {
        return panel + min(warp % STRIP, panels - 1) + (GATED ? warp / 2 * PANELS : 0);
    }
};

// By one thread: units first to last of x, for every round.
DEVICE void copy_x(const Shared& shared, const TensorMap* x, int first, int last) {
    Ring ring;
    for (int round = 0; round < ROUNDS; ++round) {
        if (!STAGED && round > 0) barrier_wait(shared.drained(), (round - 1) % 2);
        for (int unit = first; unit < last; ++unit) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const u32 stage = ring.stage + i;
                if (round * (last - first) + unit - first >= STAGES / 2) barrier_wait(shared.empty(stage), ring.parity ^ 1);
                barrier_expect(shared.full(stage), X_BYTES);
                copy_2d(shared.x(stage), x, shared.full(stage), unit * UNIT + 64 * i, blockIdx.y * TOKENS);
            }
            ring.next();
        }
    }
}

// What a warp copies of its panel: units in turns, then those of the next round. A slot is filled anew in the turn after
// the one in which it was read.
struct Ahead {
    const u8* weight;
    u32 slots;  // of the warp
    int warp, first, count, round = -1, left = 0;  // `warp`: of the round's; `left`: units of this round
    u32 slot = 0, codes, area;  // where they are in the weight

    DEVICE void begin_round() {
        for (++round; round < ROUNDS; ++round) {
            const Strip strip(round, warp / 4);
            if (strip.panels <= 0) continue;
            const u32 at = u32(strip.of_warp(warp % 4)) * u32(PANEL_BYTES);
            codes = at + first * UNIT_CODES + threadIdx.x % 32 * 16;
            area = at + AREAS_AT + (GROUP > UNIT ? 0 : first * UNIT_AREA) + threadIdx.x % 32 * 16;
            left = count;
            return;
        }
    }
    DEVICE void copy() {
        if (left > 0) {
            const u32 to = slots + slot * SLOT + threadIdx.x % 32 * 16;
#pragma unroll
            for (int i = 0; i < LOADS; ++i) copy_chunk(to + i * 512, weight + codes + i * 512);
            if (SCALES > 0 && threadIdx.x % 32 < UNIT_AREA / 16) copy_chunk(to + UNIT_CODES, weight + area);
            codes += SPLITS * UNIT_CODES;
            area += SPLITS * UNIT_AREA;
            if (--left == 0) begin_round();
        }
        copies_commit();
        if (++slot == DEPTH) slot = 0;
    }
};

// Of this thread: the sums, with SUMS those of a group of columns, not scaled yet, and their scales.
struct Sums {
    float whole[VALUES], part[VALUES], scale[2];

    DEVICE void add_part() {
#pragma unroll
        for (int i = 0; i < VALUES && SUMS; ++i) whole[i] += part[i] * scale[i / 2 % 2];
    }
};

// The sums of all tokens, or of half of them.
template <int HALVED>
DEVICE float (&sums_of(float (&d)[VALUES]))[VALUES >> HALVED] {
    return reinterpret_cast<float(&)[VALUES >> HALVED]>(d);
}
DEVICE int first_of_half() { return blockIdx.x % 2 * (TOKENS / 2); }

// Of a unit, loaded ahead: the first codes; of row lane % 16 the scale (two bfloat16 unless SUMS) and the zero point.
struct Loaded {
    uint4 codes;
    u32 scales[WORDS], lesser[WORDS];

    DEVICE void load(u32 slot) {
        const int lane = threadIdx.x % 32;
        copies_wait<DEPTH - 2>();
        __syncwarp();
#pragma unroll
        for (int w = 0; w < WORDS && SCALES > 0; ++w) {
            const u32 area = slot + UNIT_CODES + (2 * w + (SCALES > 1 ? lane / 16 : 0)) * AREA;
            const u32 at = area + SCALE_BYTES * (lane % 16);
            const float scale = SCALED * scale_of(SHORT ? get_byte(at) : HALF_SCALES ? get_half(at) : __float_as_uint(get(at)));
            const float top = rounded(scale);
            scales[w] = SUMS ? __float_as_uint(scale) : pack_bf16(top, scale - top);
            lesser[w] = less_of(ZERO ? get_byte(area + 16 * SCALE_BYTES + lane % 16) : 0);
        }
        codes = get_4(slot + lane * 16);
    }
};
// Whether a unit is loaded in the one before: where that takes no registers that are needed.
constexpr bool EARLY = GROUPS < 4;

// What is left of a unit's x, when its products have ended.
DEVICE void release_last(const Shared& shared, u32 stage) {
    if (8 / STEPS == 2) shared.release(stage);
    shared.release(stage + 1);
}

// One unit, from `slot` on. `before`: the first stage of the unit before; `next`: the slot of the next. HALVED: of half
// of the tokens.
template <int HALVED>
DEVICE void multiply(const Shared& shared, const Ring& ring, u32 before, Sums& sums, Loaded& loaded, u32 slot, u32 next,
                     Ahead& ahead) {
    const int lane = threadIdx.x % 32;
    constexpr int TURNS = 8 / STEPS;
    const u32 x = u32(matrix(shared.x(ring.stage) + (HALVED ? first_of_half() * ROW_BYTES : 0), 8 * ROW_BYTES, 16));
    if (!EARLY) {
        loaded.load(slot);
        ahead.copy();
    }
    uint4 codes = loaded.codes;
    u32 less[2] = {0, 0}, high[2], low[2], a[2][STEPS][4], both[2][4][2];
    float next_scale[2];
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
        // The registers of two turns ago have been read, and so has their x.
        product_wait<1>();
        pin(codes);  // nothing is decoded before
        if (turn == TURNS / 2 + 1) shared.release(ring.stage);
        if (!SUMS && TURNS == 2 && turn == 0) shared.release(before);
        if (!SUMS && turn == 1) shared.release(before + 1);
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            const int step = turn * STEPS + s, load = EIGHT ? step / 2 : step / 4;
            constexpr int SPAN = GROUP > 0 && GROUP < UNIT ? GROUP / 16 : 8;  // steps of a scale
            if (SCALES > 0 && step % SPAN == 0) {
                const int group = step / SPAN;
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int from = group % 2 * 16 + 8 * r + lane / 4;
                    const u32 scale = __shfl_sync(~0u, loaded.scales[group / 2], from);
                    next_scale[r] = __uint_as_float(scale);
                    high[r] = __byte_perm(scale, 0, 0x1010);
                    low[r] = __byte_perm(scale, 0, 0x3232);
                    if (ZERO) less[r] = __shfl_sync(~0u, loaded.lesser[group / 2], from);
                }
            }
            const u32 nibble = EIGHT ? 0 : step / 2 % 2;
            u32(&w)[4] = a[turn % 2][s];
            const u32 first = step % 2 ? codes.z : codes.x, second = step % 2 ? codes.w : codes.y;
            if (CODE == 5) {
                if (nibble == 0) {
                    decode_nf4(first, both[step % 2][0], both[step % 2][1]);
                    decode_nf4(second, both[step % 2][2], both[step % 2][3]);
                }
#pragma unroll
                for (int i = 0; i < 4; ++i) w[i] = both[step % 2][i][nibble];
            } else if (SMALL) {
                decode_small(first, nibble, w[0], w[1]);
                decode_small(second, nibble, w[2], w[3]);
            } else {
                decode(first, nibble, less, w[0], w[1]);
                decode(second, nibble, less, w[2], w[3]);
            }
            if (SCALES > 0 && !SUMS)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    w[i] = fma2(w[i], high[i % 2], SHORT ? MINUS_ZERO : fma2(w[i], low[i % 2], MINUS_ZERO));
            if (step % (EIGHT ? 2 : 4) == (EIGHT ? 1 : 3) && step < 7) codes = get_4(slot + (load + 1) * 512 + lane * 16);
        }
        if (SUMS && turn == 0) {
            product_wait<0>();
            release_last(shared, before);
            pin(sums.part);
            sums.add_part();
#pragma unroll
            for (int r = 0; r < 2; ++r) sums.scale[r] = next_scale[r];
        }
        if (turn % (TURNS / 2) == 0) shared.wait(ring.stage + turn / (TURNS / 2), ring.parity);
        product_fence();
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            const int step = turn * STEPS + s;
            const u32 at = x + (step / 4 * X_BYTES >> 4) + step % 4 * 2;
            if constexpr (SUMS) {
                if (step == 0) product<0>(sums.part, a[turn % 2][s], at);
                else product<1>(sums.part, a[turn % 2][s], at);
            } else {
                product<1>(sums_of<HALVED>(sums.whole), a[turn % 2][s], at);
            }
        }
        product_commit();
        if (EARLY && turn == 0) ahead.copy();
    }
    if (EARLY) loaded.load(next);
}

// Row `warp * 16 + lane / 4` (and 8 on), token 8 j + 2 (lane % 4) + e is element 4 j + 2 h + e. A token's rows follow
// one another, in an order that spreads a warp's over all banks.
DEVICE void put_sums(u32 at, int warp, const float (&d)[VALUES], bool half) {
    const int q = threadIdx.x % 4, g = threadIdx.x % 32 / 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const u32 row = at + 4 * ((warp * 16 + 8 * h + g) ^ (q << 3)) + q * (8 * ROWS) + (half ? first_of_half() * 4 * ROWS : 0);
#pragma unroll
        for (int j = 0; j < TOKENS / 8; ++j) {
            if (HALF_STRIP && half && j >= TOKENS / 16) break;
#pragma unroll
            for (int e = 0; e < 2; ++e) put(row + (8 * j + e) * (4 * ROWS), d[4 * j + 2 * h + e]);
        }
    }
}

// Four rows' sums of a token: of all splits and blocks.
DEVICE float4 sum_of(const u32 (&places)[CLUSTER], int token, int row) {
    const u32 offset = 4 * (token * ROWS + (row ^ (token / 2 % 4 << 3)));
    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int b = 0; b < CLUSTER; ++b)
#pragma unroll
        for (int s = 0; s < SPLITS; ++s) {
            const float4 v = load_sums(places[b] + s * (ROWS * TOKENS * 4) + offset);
            sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
        }
    return sum;
}

struct Operands {
    const u8* weight;
    int tokens;
    const float* bias;
    const u16* residual;
    u16* out;
};

// Row scales and bias of four rows from row n of the weight on.
DEVICE void scale_and_add(float (&v)[4], float4 sum, const Operands& o, int n) {
    v[0] = sum.x, v[1] = sum.y, v[2] = sum.z, v[3] = sum.w;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (SUMMED != 1.0f) v[i] *= SUMMED;
        if (GROUP == 0 || BYTE_SCALES == 1) v[i] *= __ldg((const float*)(o.weight + n / 16 * PANEL_BYTES + CODE_BYTES) + n % 16 + i);
        if (BIAS) v[i] += __ldg(o.bias + n + i);
    }
}

// A round's results, of this block's tokens.
DEVICE void finish(u32 sums, const Operands& o, int round) {
    u32 places[CLUSTER];
#pragma unroll
    for (int b = 0; b < CLUSTER; ++b) places[b] = CLUSTER > 1 ? place_of(sums, b) : sums;
    constexpr int QUADS = ROUND * 4, PART = TOKENS / CLUSTER, ALL = PART * QUADS, HALF_SUMS = GATED ? 2 : 1;
    constexpr int AT_ONCE = CLUSTER > 1 && ALL >= 4 * THREADS && GROUPS < 4 ? 4 : ALL >= 2 * THREADS ? 2 : 1;
    const int begin = CLUSTER > 1 ? blockIdx.x % CLUSTER * PART : 0;
    for (int first = threadIdx.x; first < ALL; first += AT_ONCE * THREADS) {
        float4 sums_of_four[AT_ONCE][HALF_SUMS];
        uint2 added[AT_ONCE];
        int at[AT_ONCE], row_of[AT_ONCE];  // the first result, the token's row; less than 0: none
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) {
            const int i = min(first + j * THREADS, ALL - 1), token = begin + i / QUADS, quad = i % QUADS;
            const int group = quad / (4 * STRIP), in_strip = quad % (4 * STRIP) * 4, row = group * 64 + in_strip;
            const Strip strip(round, group);
            row_of[j] = blockIdx.y * TOKENS + token, at[j] = strip.panel * 16 + in_strip;
            const bool none = in_strip >= 16 * strip.panels || (strip.half && token / (TOKENS / 2) != blockIdx.x % 2);
            if (none || row_of[j] >= o.tokens || first + j * THREADS >= ALL) row_of[j] = -1;
#pragma unroll
            for (int h = 0; h < HALF_SUMS; ++h) sums_of_four[j][h] = sum_of(places, token, row + 32 * h);
            if (RESIDUAL && row_of[j] >= 0) {
                const u16* r = o.residual + (long long)row_of[j] * R_ROW + at[j];
                if (R_ROW % 4 == 0) added[j] = *(const uint2*)r;
                else added[j] = {r[0] | u32(r[1]) << 16, r[2] | u32(r[3]) << 16};
            }
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) {
            if (row_of[j] < 0) continue;
            const int n = at[j];
            float v[4], up[4];
            scale_and_add(v, sums_of_four[j][0], o, n);
            if (GATED) {
                scale_and_add(up, sums_of_four[j][HALF_SUMS - 1], o, RESULTS + n);
                // Rounded as the product's own result would be.
#pragma unroll
                for (int k = 0; k < 4; ++k) v[k] = activate(rounded(v[k])) * rounded(up[k]);
            }
            if (RESIDUAL) {
                const uint2 w = added[j];
                v[0] += low_half(w.x), v[1] += high_half(w.x), v[2] += low_half(w.y), v[3] += high_half(w.y);
            }
            *(uint2*)(o.out + (long long)row_of[j] * RESULTS + n) = {pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3])};
        }
    }
}

// ---- Whole sums of gate and up ----

// Of a group's strip, rounded: tokens of 64 rows, in pieces of 16 bytes whose order spreads reads and writes over all banks.
DEVICE u32 piece_of(u32 at, int token, int piece) {
    return at + token * ROW_BYTES + ((piece ^ (token >> 1 & 3) ^ (token & 1) << 2) << 4);
}

// Four 8 by 8 matrices, each to eight places of 16 bytes, of which lane 8 i + r names row r of the i-th; a lane has a
// column's two values of each.
DEVICE void put_transposed(u32 at, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a), "r"(b), "r"(c),
                 "r"(d)
                 : "memory");
}

// A warp's 16 rows, with row scales and bias, as the product's own result would be.
DEVICE void put_strip(u32 at, const Strip& strip, int warp, const float (&d)[VALUES], const Operands& o) {
    const int lane = threadIdx.x % 32, panel = strip.of_warp(warp);
    float factor[2], add[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int row = lane / 4 + 8 * h;
        factor[h] = SUMMED, add[h] = 0.0f;
        if (GROUP == 0 || BYTE_SCALES == 1) factor[h] *= __ldg((const float*)(o.weight + panel * PANEL_BYTES + CODE_BYTES) + row);
        if (BIAS) add[h] = __ldg(o.bias + panel * 16 + row);
    }
#pragma unroll
    for (int j = 0; j < TOKENS / 8; j += 2) {
        if (HALF_STRIP && strip.half && j >= TOKENS / 16) break;
        u32 w[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float* v = d + 4 * (j + i / 2) + 2 * (i % 2);
            w[i] = pack_bf16(v[0] * factor[i % 2] + add[i % 2], v[1] * factor[i % 2] + add[i % 2]);
        }
        const int token = (strip.half ? first_of_half() : 0) + 8 * (j + lane / 16) + lane % 8;
        put_transposed(piece_of(at, token, 2 * warp + lane / 8 % 2), w[0], w[1], w[2], w[3]);
    }
}

// By some threads, of which this is the `thread`-th.
template <int OF_THREADS>
DEVICE void finish_strip(u32 at, const Strip& strip, const Operands& o, int thread) {
    const int piece = thread % 4, n = strip.panel * 16 + 8 * piece;
    if (piece / 2 >= strip.panels) return;
    const int begin = strip.half ? first_of_half() : 0, count = strip.half ? TOKENS / 2 : TOKENS;
#pragma unroll 2
    for (int i = thread / 4; i < count; i += OF_THREADS / 4) {
        const int token = begin + i, m = blockIdx.y * TOKENS + token;
        if (m >= o.tokens) break;
        const uint4 gate = get_4(piece_of(at, token, piece)), up = get_4(piece_of(at, token, 4 + piece));
        const u32 g[4] = {gate.x, gate.y, gate.z, gate.w}, u[4] = {up.x, up.y, up.z, up.w};
        u32 y[4];
#pragma unroll
        for (int k = 0; k < 4; ++k)
            y[k] = pack_bf16(activate(low_half(g[k])) * low_half(u[k]), activate(high_half(g[k])) * high_half(u[k]));
        *(uint4*)(o.out + (long long)m * RESULTS + n) = make_uint4(y[0], y[1], y[2], y[3]);
    }
}

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
