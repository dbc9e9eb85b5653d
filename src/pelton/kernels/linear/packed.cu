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
// block has in shared memory, is multiplied by 2^104 to make up for it; of codes in high nibbles, which stay where
// they are, by 2^100. So |x| must be below 2^23. The zero point's part is the sum of x over the group.
//
// Constants: RESULTS results of INNER columns; TOKENS at most (rows of x; up to 16); SPLITS, PARTS, BATCH (16 rows,
// gated: of each half); GROUPS; FINISHERS; STAGES; CLUSTER; WORKERS (clusters); NORM (x passes an RMS norm first); BIAS, RESIDUAL
// (whether there is one); X_ROW, R_ROW (elements from row to row); and decode.cuh's.
#include "decode.cuh"
#include "hopper.cuh"
#include "shared.cuh"

constexpr int UNIT = 128, UNITS = INNER / UNIT, OWN = UNITS / CLUSTER;
constexpr int PLACES = SPLITS / GROUPS, STEPS = (OWN + PLACES - 1) / PLACES;  // units of a stage, stages of a batch
constexpr int WARPS = SPLITS * PARTS, THREADS = WARPS * 32, TILES = (TOKENS + 7) / 8;
constexpr int SUMMING = THREADS + 32 * FINISHERS;  // threads that make sums, and that add them up
constexpr int HALVES = GATED ? 2 : 1, EACH = PARTS * BATCH, PANELS = RESULTS / 16, ROWS16 = BATCH * HALVES;
constexpr int SCALES = GROUP > 0 ? UNIT / GROUP : 0, SETS = GROUP > 0 ? SCALES : 1;  // of a unit
constexpr bool SHIFTED = ZERO || CODE == 2;  // signed bytes are taken as 128 more
// Of the next weight every block fetches so many times 16 rows into L2, of each so many bytes at most.
constexpr int AHEAD = 2, AHEAD_BYTES = 40 << 10;
// Bytes of a unit; of what lies in shared memory, and where.
constexpr u32 CODES = EIGHT ? 2048 : 1024, AREAS = SCALES * AREA;
constexpr int COPIERS = AREAS ? 2 : 1;  // warps of which one thread copies
constexpr u32 STAGE_BYTES = EACH * HALVES * PLACES * (CODES + AREAS);
constexpr u32 X_STRIDE = OWN * UNIT * 2 + 16, TILE_BYTES = 128 * 4, TOKEN_BYTES = TILES * 8 * 4;
constexpr int SLOTS = ((PANELS + WORKERS - 1) / WORKERS + CLUSTER - 1) / CLUSTER;  // panels that a block joins
constexpr u32 X_AT = STAGES * STAGE_BYTES;
constexpr u32 X_SUMS_AT = X_AT + TOKENS * X_STRIDE;
constexpr u32 X_SQUARES_AT = X_SUMS_AT + (SHIFTED ? OWN * SETS * TOKEN_BYTES : 0);
constexpr u32 SQUARES_AT = X_SQUARES_AT + (NORM ? OWN * TOKEN_BYTES : 0);
constexpr u32 SUMS_AT = SQUARES_AT + CLUSTER * TOKEN_BYTES;
constexpr u32 SUMS_BYTES = SPLITS * EACH * HALVES * TILES * TILE_BYTES;  // of a batch
constexpr u32 PARTS_AT = SUMS_AT + 2 * SUMS_BYTES;
constexpr u32 BARRIERS_AT = PARTS_AT + (CLUSTER > 1 ? CLUSTER * SLOTS * HALVES * TILES * TILE_BYTES : 0);
static_assert(INNER % UNIT == 0 && UNITS % CLUSTER == 0 && RESULTS % 16 == 0, "whole units and panels");
static_assert(SPLITS % GROUPS == 0 && STAGES % GROUPS == 0, "groups of as many splits and stages each");
static_assert(TOKENS <= 8 || TOKENS == 16, "whole tiles");

// What x is multiplied by, of codes in low and in high nibbles; what sums are, to make up for both.
constexpr u32 LOW_FACTOR = 0x73807380, HIGH_FACTOR = CODE == 0 ? 0x71807180 : LOW_FACTOR;  // 2^104, 2^100
constexpr float BACK = CODE == 1 ? 65536.0f : CODE == 4 ? 4194304.0f : 536870912.0f;  // 2^16, 2^22, 2^29

DEVICE u32 times(u32 a, u32 b) {
    u32 y;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}

DEVICE void launch_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
DEVICE void prefetch_bytes(const u8* at, int bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(at), "r"(bytes) : "memory");
}
DEVICE void prefetch(const float* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

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
    // Named barriers of the sums of batch b: there, and taken.
    DEVICE u32 summed(int b) const { return 2 + b % 2; }
    DEVICE u32 taken(int b) const { return 4 + b % 2; }
    DEVICE int panel(int index) const { return cluster + index * WORKERS; }
    DEVICE int batches() const { return (mine + EACH - 1) / EACH; }
};

// By one thread: codes, or scale areas, of UNIT_BYTES a unit, those of panel 0 from `source` on, to `target` of a stage.
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
            if (filled >= STAGES) barrier_wait(block.empty(place.stage), place.parity ^ 1);
            const u32 bytes = (OWN % PLACES == 0 ? PLACES : min(PLACES, OWN - s * PLACES)) * UNIT_BYTES;
            barrier_expect(block.full(place.stage), panels * HALVES * bytes);
            // Unrolled, so that a copy takes few instructions: a thread issues one after another.
#pragma unroll
            for (int i = 0; i < EACH * HALVES; ++i)
                if (i < panels * HALVES)
                    copy_bytes(block.base + place.stage * STAGE_BYTES + target + i * PLACES * UNIT_BYTES,
                               from + (i / HALVES * WORKERS + i % HALVES * PANELS) * PANEL_BYTES, bytes,
                               block.full(place.stage));
        }
    }
}

// x to shared memory; the sums of groups, and of squares of 128 columns.
DEVICE void prepare(const Block& block, const u16* x, const float* norm, int tokens) {
    constexpr int CHUNKS = OWN * 16, TURNS = (CHUNKS * TOKENS + THREADS - 1) / THREADS;  // of 8 columns
    constexpr int AT_ONCE = TURNS < 4 ? TURNS : 4;
    const int columns = block.rank * OWN * UNIT;
    for (int first = 0; first < CHUNKS * TOKENS; first += THREADS * AT_ONCE) {
        uint4 w[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) {
            const int i = first + j * THREADS + int(threadIdx.x), token = i / CHUNKS, chunk = i % CHUNKS;
            w[j] = make_uint4(0, 0, 0, 0);
            if (token < tokens) w[j] = *(const uint4*)(x + (long long)token * X_ROW + columns + chunk * 8);
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) {
            const int i = first + j * THREADS + int(threadIdx.x), token = i / CHUNKS, chunk = i % CHUNKS;
            float square = 0.0f, sum = 0.0f;
            if (NORM) {
                const float4 low = __ldg((const float4*)(norm + columns) + 2 * chunk);
                const float4 high = __ldg((const float4*)(norm + columns) + 2 * chunk + 1);
                const float v[8] = {low_half(w[j].x), high_half(w[j].x), low_half(w[j].y), high_half(w[j].y),
                                    low_half(w[j].z), high_half(w[j].z), low_half(w[j].w), high_half(w[j].w)};
#pragma unroll
                for (int e = 0; e < 8; ++e) square += v[e] * v[e];
                w[j] = make_uint4(pack_bf16(v[0] * low.x, v[1] * low.y), pack_bf16(v[2] * low.z, v[3] * low.w),
                                  pack_bf16(v[4] * high.x, v[5] * high.y), pack_bf16(v[6] * high.z, v[7] * high.w));
            }
            const u32 words[4] = {w[j].x, w[j].y, w[j].z, w[j].w};
            if (SHIFTED)
#pragma unroll
                for (int e = 0; e < 4; ++e) sum += low_half(words[e]) + high_half(words[e]);
#pragma unroll
            for (int lanes = 1; lanes < 16; lanes *= 2) {
                if (SHIFTED && lanes * SETS < 16) sum += __shfl_xor_sync(~0u, sum, lanes);
                if (NORM) square += __shfl_xor_sync(~0u, square, lanes);
            }
            if (token >= TOKENS) continue;
            const u32 factor = chunk % 8 < 4 ? LOW_FACTOR : HIGH_FACTOR;
            put_4(block.base + X_AT + token * X_STRIDE + chunk * 16, times(words[0], factor), times(words[1], factor),
                  times(words[2], factor), times(words[3], factor));
            if (SHIFTED && chunk * SETS % 16 == 0)
                put(block.base + X_SUMS_AT + chunk * SETS / 16 * TOKEN_BYTES + token * 4, sum * (1.0f / BACK));
            if (NORM && chunk % 16 == 0) put(block.base + X_SQUARES_AT + chunk / 16 * TOKEN_BYTES + token * 4, square);
        }
    }
    named_sync(1, THREADS);
    if (CLUSTER > 1) cluster_wait();
    if (!NORM) return;
    for (int token = threadIdx.x / 32; token < TOKENS; token += WARPS) {
        float sum = 0.0f;
        for (int u = threadIdx.x % 32; u < OWN; u += 32) sum += get(block.base + X_SQUARES_AT + u * TOKEN_BYTES + token * 4);
#pragma unroll
        for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
        const int rank = threadIdx.x % 32;
        if (rank < CLUSTER) put_to(block.base + SQUARES_AT + block.rank * TOKEN_BYTES + token * 4, rank, sum);
    }
}

#include "packed_unit.cuh"

// Sums lie as the tensor core's results do: tiles of 16 rows by 8 tokens, of whose 128 elements a lane has four. Of
// one token 16 are results.
constexpr int WANTED = TOKENS == 1 ? 16 : TILES * 128;
DEVICE int element_of(int i) { return TOKENS == 1 ? i % 8 * 16 + i % 16 / 8 * 2 : i % (TILES * 128); }
DEVICE int row_of(int element) { return element / 16 % 8 + element / 2 % 2 * 8; }
DEVICE int token_of(int element) { return element / 128 % TILES * 8 + element / 4 % 4 * 2 + element % 2; }

struct Results {
    const u8* weight;
    const float* bias;
    const u16* residual;
    u16* out;
    int tokens;
    float eps;

    DEVICE float added(int panel, int element) const {
        const int m = token_of(element);
        return RESIDUAL && m < tokens ? low_half(residual[(long long)m * R_ROW + panel * 16 + row_of(element)]) : 0.0f;
    }

    // `y`: the sums of gate and up.
    DEVICE void finish(const Block& block, int panel, int element, float (&y)[HALVES], float addend) const {
        const int m = token_of(element), row = row_of(element), n = panel * 16 + row;
        if (m >= tokens) return;
        float factor = BACK;
        if (NORM) {
            float squares = 0.0f;
#pragma unroll
            for (int rank = 0; rank < CLUSTER; ++rank) squares += get(block.base + SQUARES_AT + rank * TOKEN_BYTES + m * 4);
            factor *= rsqrtf(squares / INNER + eps);
        }
#pragma unroll
        for (int h = 0; h < HALVES; ++h) {
            y[h] *= factor;
            if (GROUP == 0) y[h] *= __ldg((const float*)(weight + (panel + h * PANELS) * PANEL_BYTES + CODE_BYTES) + row);
            if (BIAS) y[h] += bias[h * RESULTS + n];
        }
        // Rounded as the product's own result would be.
        float v = GATED ? activate(rounded(y[0])) * rounded(y[HALVES - 1]) : y[0];
        if (RESIDUAL) v += addend;
        out[(long long)m * RESULTS + n] = u16(pack_bf16(v, 0.0f));
    }
};

DEVICE void compute(const Block& block) {
    const int warp = threadIdx.x / 32, split = warp % SPLITS, part = warp / SPLITS, lane = threadIdx.x % 32;
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
        if (b > 1) named_sync(block.taken(b), SUMMING);
        const u32 own = block.base + SUMS_AT + b % 2 * SUMS_BYTES +
                        (split * EACH * HALVES + part * ROWS16) * (TILES * TILE_BYTES) + lane * 16;
#pragma unroll
        for (int i = 0; i < ROWS16; ++i)
#pragma unroll
            for (int t = 0; t < TILES; ++t)
                put_4(own + (i * TILES + t) * TILE_BYTES, __float_as_uint(d[i][t][0]), __float_as_uint(d[i][t][1]),
                      __float_as_uint(d[i][t][2]), __float_as_uint(d[i][t][3]));
        named_arrive(block.summed(b), SUMMING);
    }
}

// Where a block of the cluster has the sums of its columns, of an element of a panel that this one joins.
DEVICE u32 part_at(const Block& block, int rank, int slot, int half, int element) {
    return block.base + PARTS_AT + (((rank * SLOTS + slot) * HALVES + half) * TILES * 128 + element) * 4;
}

DEVICE void finish_batches(const Block& block, const Results& results) {
    constexpr int TURNS = (EACH * WANTED + 32 * FINISHERS - 1) / (32 * FINISHERS);
    const int thread = threadIdx.x - (THREADS + 32 * COPIERS);
    if (CLUSTER > 1) cluster_wait();
    for (int b = 0; b < block.batches(); ++b) {
        float addend[TURNS];
#pragma unroll
        for (int j = 0; j < TURNS; ++j) {
            const int i = j * 32 * FINISHERS + thread, index = b * EACH + i / WANTED;
            addend[j] = CLUSTER == 1 && i < EACH * WANTED && index < block.mine
                            ? results.added(block.panel(index), element_of(i))
                            : 0.0f;
        }
        named_sync(block.summed(b), SUMMING);
#pragma unroll
        for (int j = 0; j < TURNS; ++j) {
            const int i = j * 32 * FINISHERS + thread, local = i / WANTED, index = b * EACH + local, element = element_of(i);
            if (i >= EACH * WANTED || index >= block.mine || token_of(element) >= results.tokens) continue;
            float y[HALVES];
#pragma unroll
            for (int h = 0; h < HALVES; ++h) {
                const u32 at = block.base + SUMS_AT + b % 2 * SUMS_BYTES +
                               ((local * HALVES + h) * TILES * 128 + element) * 4;
                y[h] = 0.0f;
#pragma unroll
                for (int w = 0; w < SPLITS; ++w) y[h] += get(at + w * EACH * HALVES * TILES * TILE_BYTES);
                if (CLUSTER > 1) put_to(part_at(block, block.rank, index / CLUSTER, h, element), index % CLUSTER, y[h]);
            }
            if (CLUSTER == 1) results.finish(block, block.panel(index), element, y, addend[j]);
        }
        if (b + 2 < block.batches()) named_arrive(block.taken(b), SUMMING);
    }
}

// Of the panels whose parts lie in this block's shared memory.
DEVICE void join(const Block& block, const Results& results) {
    constexpr int ELEMENTS = SLOTS * WANTED, TURNS = (ELEMENTS + THREADS - 1) / THREADS;
    float addend[TURNS];
#pragma unroll
    for (int j = 0; j < TURNS; ++j) {
        const int i = j * THREADS + threadIdx.x, index = i / WANTED * CLUSTER + block.rank;
        addend[j] = i < ELEMENTS && index < block.mine ? results.added(block.panel(index), element_of(i)) : 0.0f;
    }
    cluster_wait();
#pragma unroll
    for (int j = 0; j < TURNS; ++j) {
        const int i = j * THREADS + threadIdx.x, slot = i / WANTED, index = slot * CLUSTER + block.rank;
        if (i >= ELEMENTS || index >= block.mine) continue;
        float y[HALVES];
#pragma unroll
        for (int h = 0; h < HALVES; ++h) {
            y[h] = 0.0f;
#pragma unroll
            for (int rank = 0; rank < CLUSTER; ++rank) y[h] += get(part_at(block, rank, slot, h, element_of(i)));
        }
        results.finish(block, block.panel(index), element_of(i), y, addend[j]);
    }
}

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
        barrier_init_fence();
    }
    __syncthreads();
    if (CLUSTER > 1) cluster_arrive();
    const Results results{weight, bias, residual, out, tokens, eps};
    if (threadIdx.x < THREADS) {
        if (NORM)
            for (int i = threadIdx.x * 32; i < OWN * UNIT; i += THREADS * 32)
                prefetch(norm + block.rank * OWN * UNIT + i);
        wait_for_previous();
        prepare(block, x, norm, tokens);
        compute(block);
    } else if (threadIdx.x < THREADS + 32 * COPIERS) {
        if (threadIdx.x == THREADS) {
            launch_next();
            copy<CODES>(block, weight, 0);
            if (ahead_count) {
                const Place last(max(0, block.batches() * STEPS - 1));
                barrier_wait(block.full(last.stage), last.parity);  // else it would be in this weight's way
                for (int i = blockIdx.x; i < min(ahead_count, AHEAD * WORKERS * CLUSTER); i += WORKERS * CLUSTER)
                    prefetch_bytes(ahead + (long long)i * ahead_bytes, min(ahead_bytes, AHEAD_BYTES));
            }
        } else if (AREAS && threadIdx.x == THREADS + 32) {
            copy<AREAS>(block, weight + CODE_BYTES, EACH * HALVES * PLACES * CODES);
        }
        __syncwarp();
        if (CLUSTER > 1) cluster_wait();
        wait_for_previous();
    } else {
        wait_for_previous();
        finish_batches(block, results);
    }
    if (CLUSTER > 1) {
        __syncwarp();
        cluster_arrive();
        if (threadIdx.x < THREADS) join(block, results);
        else cluster_wait();
    }
}
