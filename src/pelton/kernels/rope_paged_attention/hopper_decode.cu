// rope_paged_attention of a few sequences with one token each, on compute capability 9.0: one launch, in which
// nothing goes through global memory but the operands.
//
// A cluster of CLUSTER blocks has one KV head of one sequence. Its warps take tiles of 16 keys in turn, each warp
// for itself: it copies them to its own part of shared memory, STAGES tiles ahead, and keeps its own online
// softmax (Milakov & Gimelshein, 2018). The first copies begin before the kernel ahead of this one has ended: they
// are of earlier steps, and the step's tables were there before its first kernel. Then each block rotates the
// group's queries. A warp more in the last block rotates the new key, stores it and its value, and attends to them
// as a tile of one. At the end warps join their parts in shared memory; then each block sends every other its part of
// a share of the result, and joins what it is sent.
//
// Constants: KV_HEADS, GROUP (query heads of a KV head, up to 16), D (64, 128), TURN (half the dimensions that
// rotate), PAGE (8 to 128, a power of two), COLUMNS of the block table, Q_ROW, K_ROW, V_ROW and Q_HEAD, K_HEAD,
// V_HEAD (strides, elements), WINDOW, SOFTCAP, HALF (float16 instead of bfloat16), NORM_Q, NORM_K (whether heads
// are normalised first), WEIGHTS32 (whether the norms' weights are float32), CLUSTER (1 to 8), WARPS, STAGES.
#include "hopper.cuh"

typedef unsigned short u16;

constexpr int THREADS = 32 * (WARPS + 1), KEYS = 16, ROWS = 16;
// As if there were more threads, where they would leave no registers for a block of the product before.
constexpr int BOUND = WARPS > 4 && THREADS < 416 ? 416 : THREADS;
constexpr int PAGES = PAGE < KEYS ? KEYS / PAGE : 1;  // that a tile's keys lie in
constexpr int CHUNKS = D / 8;  // of 16 bytes, in a row
constexpr u32 ROW_BYTES = 2 * D, TILE_BYTES = KEYS * ROW_BYTES, STAGE_BYTES = 2 * TILE_BYTES;
constexpr int VALUES = GROUP * D, HEADS = KV_HEADS * GROUP;
constexpr int SHARE = VALUES / CLUSTER;  // of the result, that a block writes
constexpr float LOG2_E = 1.4426950408889634f;
#define NEGATIVE_INFINITY __int_as_float(0xff800000)

// Shared memory: the warps' tiles (later their parts), queries, the new key and value; from each block of the cluster
// its part of this block's share, and of each head its largest score and its sum; the barrier that counts their bytes.
constexpr u32 Q_AT = WARPS * STAGES * STAGE_BYTES, NEW_AT = Q_AT + TILE_BYTES, PART_AT = NEW_AT + STAGE_BYTES;
constexpr u32 BEST_AT = PART_AT + 4 * VALUES, TOTAL_AT = BEST_AT + 4 * GROUP * CLUSTER;
constexpr u32 BARRIER_AT = TOTAL_AT + 4 * GROUP * CLUSTER, WARP_BEST_AT = BARRIER_AT + 8;
constexpr u32 WARP_TOTAL_AT = WARP_BEST_AT + 4 * ROWS * (WARPS + 1);
static_assert(4 * VALUES <= STAGE_BYTES, "a warp's part fits where its tiles were");
static_assert(VALUES % CLUSTER == 0, "shares are equal");
// Where a warp's part is; the last one's tile is the new key's.
DEVICE u32 part_at(int warp) { return warp < WARPS ? warp * (STAGES * STAGE_BYTES) : NEW_AT; }

// ---- Elements ----

DEVICE float to_float(u16 x) {
#if HALF
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
#else
    return __int_as_float(int(x) << 16);
#endif
}

DEVICE u16 to_element(float x) {
    u16 y;
    asm("cvt.rn." ELEMENT ".f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}

#if WEIGHTS32
typedef float Weight;
DEVICE float weight_of(float x) { return x; }
#else
typedef u16 Weight;
DEVICE float weight_of(u16 x) { return to_float(x); }
#endif

// ---- Shared memory ----

// Where 16-byte chunk `chunk` of a row lies: turned by the row, so that eight rows' chunks are in all banks.
DEVICE u32 place(int row, int chunk) { return row * ROW_BYTES + ((chunk ^ (row & 7)) << 4); }

DEVICE void copy_chunk(u32 target, const void* source) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
}

DEVICE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING>
DEVICE void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

DEVICE void load_matrices(u32 (&x)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
}

DEVICE void load_transposed(u32 (&x)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
}

// d (16 x 8) += a (16 x 16) @ b (16 x 8).
DEVICE void product(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." ELEMENT "." ELEMENT ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
                 "{%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- Cluster ----

DEVICE void cluster_arrive() {
    if (CLUSTER > 1) asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

DEVICE void cluster_wait() {
    if (CLUSTER > 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Into the shared memory of another block, whose barrier counts the bytes.
DEVICE void send(float x, u32 address, u32 barrier, int rank) {
    u32 there, barrier_there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(barrier_there) : "r"(barrier), "r"(rank));
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(there),
                 "f"(x), "r"(barrier_there)
                 : "memory");
}

DEVICE void prefetch(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

DEVICE float max_of_4_lanes(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}

DEVICE float sum_of_4_lanes(float x) {
    x += __shfl_xor_sync(0xffffffff, x, 1);
    return x + __shfl_xor_sync(0xffffffff, x, 2);
}

// ---- A head of the step, rotated by a warp: element lane + 32 i in out[i] ----

template <bool NORM>
DEVICE void rotate(u16 (&out)[D / 32], const u16* x, const Weight* weight, const float* cos_sin, float eps) {
    const int lane = threadIdx.x % 32;
    float a[D / 32], b[D / 32], cosine[D / 32], sine[D / 32], squares = 0.0f;
#pragma unroll
    for (int i = 0; i < D / 32; ++i) {
        const int d = lane + 32 * i;
        // The other of the two values that a dimension is rotated with.
        const int other = d < TURN ? d + TURN : d < 2 * TURN ? d - TURN : d;
        a[i] = to_float(x[d]);
        b[i] = to_float(x[other]);
        const int angle = d < TURN ? d : d - TURN;
        cosine[i] = d < 2 * TURN ? cos_sin[angle] : 1.0f;
        sine[i] = d < 2 * TURN ? cos_sin[TURN + angle] : 0.0f;
        squares += a[i] * a[i];
    }
    if (NORM) {
#pragma unroll
        for (int step = 16; step; step /= 2) squares += __shfl_xor_sync(0xffffffff, squares, step);
        const float scale = rsqrtf(squares / D + eps);
#pragma unroll
        for (int i = 0; i < D / 32; ++i) {
            const int d = lane + 32 * i;
            const int other = d < TURN ? d + TURN : d < 2 * TURN ? d - TURN : d;
            // Rounded where the reference rounds: the norm's result has the element type.
            a[i] = to_float(to_element(a[i] * scale * weight_of(weight[d])));
            b[i] = to_float(to_element(b[i] * scale * weight_of(weight[other])));
        }
    }
#pragma unroll
    for (int i = 0; i < D / 32; ++i)
        out[i] = to_element(a[i] * cosine[i] + (lane + 32 * i < TURN ? -b[i] : b[i]) * sine[i]);
}

// Element d of a row of a tile in shared memory.
DEVICE u16* element(unsigned char* tile, int row, int d) {
    return reinterpret_cast<u16*>(tile + place(row, d / 8)) + d % 8;
}

// ---- What a warp has seen: rows lane / 4 and lane / 4 + 8 of the scores ----

struct Part {
    float best[2], total[2];
    float out[CHUNKS][4];

    DEVICE Part() {
        best[0] = best[1] = NEGATIVE_INFINITY;
        total[0] = total[1] = 0.0f;
#pragma unroll
        for (int n = 0; n < CHUNKS; ++n) out[n][0] = out[n][1] = out[n][2] = out[n][3] = 0.0f;
    }

    // One tile more, K at `tile`, V behind it; keys `from` to `to` of it count.
    DEVICE void attend(const u32 (&q)[D / 16][4], u32 tile, int from, int to, float scale, float softcap) {
        const int lane = threadIdx.x % 32;
        float s[2][4] = {};
#pragma unroll
        for (int k = 0; k < D / 16; ++k) {
            u32 keys[4];
            load_matrices(keys, tile + place(lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
            product(s[0], q[k], keys[0], keys[1]);
            product(s[1], q[k], keys[2], keys[3]);
        }
        // Scores in units of log2(e), so that exp2 of them costs no multiplication of its own.
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            float& x = s[i / 4][i % 4];
            if (SOFTCAP)  // softcap tanh(x / softcap), tanh(u) = 1 - 2 / (exp(2 u) + 1)
                x = softcap * (1.0f - 2.0f / (exp2_fast(2.0f * LOG2_E * scale * x / softcap) + 1.0f)) * LOG2_E;
            else
                x *= scale * LOG2_E;
            const int key = i / 4 * 8 + lane % 4 * 2 + i % 2;
            if (key < from || key >= to) x = NEGATIVE_INFINITY;
        }
        u32 p[4] = {0, 0, 0, 0};
#pragma unroll
        for (int half = 0; half < (GROUP > 8 ? 2 : 1); ++half) {
            float* low = s[0] + 2 * half;
            float* high = s[1] + 2 * half;
            const float top = max_of_4_lanes(fmaxf(fmaxf(low[0], low[1]), fmaxf(high[0], high[1])));
            const float now = fmaxf(best[half], top);
            // A row that has seen no key yet has -inf, and -inf - -inf is NaN.
            const float shift = now == NEGATIVE_INFINITY ? 0.0f : now;
            const float shrink = exp2_fast(best[half] - shift);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                low[i] = exp2_fast(low[i] - shift);
                high[i] = exp2_fast(high[i] - shift);
            }
            total[half] = total[half] * shrink + low[0] + low[1] + high[0] + high[1];
            best[half] = now;
            p[half] = pack(low[0], low[1]);
            p[2 + half] = pack(high[0], high[1]);
#pragma unroll
            for (int n = 0; n < CHUNKS; ++n) {
                out[n][2 * half] *= shrink;
                out[n][2 * half + 1] *= shrink;
            }
        }
#pragma unroll
        for (int n = 0; n < CHUNKS; n += 2) {
            u32 values[4];
            load_transposed(values, tile + TILE_BYTES + place(lane % 16, n + lane / 16));
            product(out[n], p, values[0], values[1]);
            product(out[n + 1], p, values[2], values[3]);
        }
    }

    // Into shared memory: the values at `part`, [head][D].
    DEVICE void store(float* part, float* bests, float* totals) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int half = 0; half < (GROUP > 8 ? 2 : 1); ++half) {
            const int head = lane / 4 + 8 * half;
            const float sum = sum_of_4_lanes(total[half]);
            if (head >= GROUP) continue;
            bests[head] = best[half];
            totals[head] = sum;
#pragma unroll
            for (int n = 0; n < CHUNKS; ++n)
                *reinterpret_cast<float2*>(part + head * D + 8 * n + lane % 4 * 2) =
                    make_float2(out[n][2 * half], out[n][2 * half + 1]);
        }
    }
};

extern "C" __global__ void __launch_bounds__(BOUND) __cluster_dims__(CLUSTER, 1, 1)
    decode(const u16* q, const u16* k, const u16* v, const float* cos_sin, u16* k_cache, u16* v_cache,
           const int* slots, const int* block_table, const int* seq_lens, const Weight* q_weight,
           const Weight* k_weight, u16* out, float eps, float scale, float softcap) {
    extern __shared__ __align__(128) unsigned char memory[];
    asm volatile("griddepcontrol.launch_dependents;");
    const u32 base = shared_address(memory);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int rank = blockIdx.x, kv_head = blockIdx.y;
    const long long b = blockIdx.z;
    if (CLUSTER > 1 && threadIdx.x == 0) {
        barrier_init(base + BARRIER_AT, 1);
        barrier_init_fence();
        barrier_expect(base + BARRIER_AT, 4 * VALUES + 8 * GROUP * CLUSTER);
    }
    cluster_arrive();
    const float* turn = cos_sin + b * (2 * TURN);
    // A layer's weights have pushed the angles out of L2 since the layer before.
    if (warp == WARPS && lane * 32 < 2 * TURN) prefetch(turn + lane * 32);
    const int n_keys = seq_lens[b], slot = slots[b];
    // Keys in the cache, and the first that the token sees. A token without a slot is in the cache itself.
    const int cached = slot >= 0 ? n_keys - 1 : n_keys;
    const int first = WINDOW > 0 && n_keys > WINDOW ? n_keys - WINDOW : 0;
    const int tiles = cached > first ? (cached + KEYS - 1) / KEYS : 0;
    // The warp of the new key; all others copy tiles.
    const bool has_newest = rank == CLUSTER - 1 && slot >= 0, copies = warp < WARPS;
    constexpr int TURNS = CLUSTER * WARPS;
    const int begin = first / KEYS + warp * CLUSTER + rank;
    const int* table = block_table + b * COLUMNS;
    const u32 ring = base + warp * (STAGES * STAGE_BYTES);

    struct Blocks {
        int of[PAGES];
    };
    // The blocks of a tile, which may be one that there is not.
    auto look_up = [&](int tile) {
        Blocks blocks;
#pragma unroll
        for (int i = 0; i < PAGES; ++i) blocks.of[i] = table[min(tile * KEYS / PAGE + i, COLUMNS - 1)];
        return blocks;
    };
    auto copy_tile = [&](int tile, int stage, const Blocks& blocks) {
        if (tile < tiles) {
#pragma unroll
            for (int i = 0; i < KEYS * CHUNKS / 32; ++i) {
                const int row = (i * 32 + lane) / CHUNKS, chunk = lane % CHUNKS;
                // Beyond the end the last key again, before the window its first: what is there may be anything,
                // NaN too, and blocks that are wholly outside the window are not there at all.
                const int key = min(max(tile * KEYS + row, first), cached - 1);
                long long block = blocks.of[0];
#pragma unroll
                for (int page = 1; page < PAGES; ++page)
                    if (key / PAGE == tile * PAGES + page) block = blocks.of[page];
                const long long at = ((block * KV_HEADS + kv_head) * PAGE + key % PAGE) * D + 8 * chunk;
                const u32 target = ring + stage * STAGE_BYTES + place(row, chunk);
                copy_chunk(target, k_cache + at);
                copy_chunk(target + TILE_BYTES, v_cache + at);
            }
        }
        copies_commit();  // none, too: groups are counted
    };
    // Looked up ahead of the copies, and those of the loop a turn ahead, so that copies wait for nothing.
    Blocks ahead[STAGES + 1] = {};
    if (copies) {
#pragma unroll
        for (int stage = 0; stage <= STAGES; ++stage) ahead[stage] = look_up(begin + stage * TURNS);
#pragma unroll
        for (int stage = 0; stage < STAGES; ++stage) copy_tile(begin + stage * TURNS, stage, ahead[stage]);
    }
    // Rows that no head has, and the keys that are not new, are zeros.
    for (u32 at = 16 * threadIdx.x; at < TILE_BYTES + (has_newest ? STAGE_BYTES : 0); at += 16 * THREADS)
        *reinterpret_cast<int4*>(memory + Q_AT + at) = make_int4(0, 0, 0, 0);
    __syncthreads();

    wait_for_previous();
    u16 x[D / 32];
    for (int head = warp; copies && head < GROUP; head += WARPS) {
        rotate<NORM_Q>(x, q + b * Q_ROW + (kv_head * GROUP + head) * Q_HEAD, q_weight, turn, eps);
#pragma unroll
        for (int i = 0; i < D / 32; ++i) *element(memory + Q_AT, head, lane + 32 * i) = x[i];
    }
    if (!copies && has_newest) {
        const long long at = (((long long)(slot / PAGE) * KV_HEADS + kv_head) * PAGE + slot % PAGE) * D;
        u16 value[D / 32];
#pragma unroll
        for (int i = 0; i < D / 32; ++i) value[i] = v[b * V_ROW + kv_head * V_HEAD + lane + 32 * i];
        rotate<NORM_K>(x, k + b * K_ROW + kv_head * K_HEAD, k_weight, turn, eps);
#pragma unroll
        for (int i = 0; i < D / 32; ++i) {
            const int d = lane + 32 * i;
            k_cache[at + d] = x[i];
            v_cache[at + d] = value[i];
            *element(memory + NEW_AT, 0, d) = x[i];
            *element(memory + NEW_AT + TILE_BYTES, 0, d) = value[i];
        }
    }
    __syncthreads();
    u32 queries[D / 16][4];
#pragma unroll
    for (int i = 0; i < D / 16; ++i)
        load_matrices(queries[i], base + Q_AT + place(lane % 16, 2 * i + lane / 16));

    Part part;
    if (copies) {
        int stage = 0;
        Blocks next = ahead[STAGES];
        for (int tile = begin; tile < tiles; tile += TURNS) {
            const Blocks blocks = next;
            next = look_up(tile + (STAGES + 1) * TURNS);
            copies_wait<STAGES - 1>();
            __syncwarp();
            part.attend(queries, ring + stage * STAGE_BYTES, first - tile * KEYS, cached - tile * KEYS, scale, softcap);
            __syncwarp();
            copy_tile(tile + STAGES * TURNS, stage, blocks);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
        copies_wait<0>();
    } else if (has_newest) {
        part.attend(queries, base + NEW_AT, 0, 1, scale, softcap);
    }
    __syncwarp();

    float* bests = reinterpret_cast<float*>(memory + WARP_BEST_AT);
    float* totals = reinterpret_cast<float*>(memory + WARP_TOTAL_AT);
    if (copies || has_newest)
        part.store(reinterpret_cast<float*>(memory + part_at(warp)), bests + ROWS * warp, totals + ROWS * warp);
    __syncthreads();
    const int parts = WARPS + has_newest;
    cluster_wait();  // until all barriers are there
    u16* to = out + (b * HEADS + kv_head * GROUP) * D;
    for (int i = threadIdx.x; i < VALUES; i += THREADS) {
        const int head = i / D;
        float best = NEGATIVE_INFINITY, total = 0.0f, value = 0.0f;
        for (int w = 0; w < parts; ++w) best = fmaxf(best, bests[ROWS * w + head]);
        const float shift = best == NEGATIVE_INFINITY ? 0.0f : best;
        for (int w = 0; w < parts; ++w) {
            const float share = exp2_fast(bests[ROWS * w + head] - shift);
            total += share * totals[ROWS * w + head];
            value += share * reinterpret_cast<const float*>(memory + part_at(w))[i];
        }
        if (CLUSTER == 1) {
            to[i] = to_element(total > 0.0f ? value / total : 0.0f);
            continue;
        }
        send(value, base + PART_AT + 4 * (rank * SHARE + i % SHARE), base + BARRIER_AT, i / SHARE);
        // The head's score and sum are sent by as many threads as there are blocks.
        if (i % D < CLUSTER) {
            send(best, base + BEST_AT + 4 * (rank * GROUP + head), base + BARRIER_AT, i % D);
            send(total, base + TOTAL_AT + 4 * (rank * GROUP + head), base + BARRIER_AT, i % D);
        }
    }
    if (CLUSTER == 1) return;
    barrier_wait(base + BARRIER_AT, 0);
    const float* bests_of = reinterpret_cast<const float*>(memory + BEST_AT);
    const float* totals_of = reinterpret_cast<const float*>(memory + TOTAL_AT);
    const float* values_of = reinterpret_cast<const float*>(memory + PART_AT);
    for (int i = threadIdx.x; i < SHARE; i += THREADS) {
        const int head = (rank * SHARE + i) / D;
        float best = NEGATIVE_INFINITY, total = 0.0f, value = 0.0f;
#pragma unroll
        for (int r = 0; r < CLUSTER; ++r) best = fmaxf(best, bests_of[r * GROUP + head]);
        const float shift = best == NEGATIVE_INFINITY ? 0.0f : best;
#pragma unroll
        for (int r = 0; r < CLUSTER; ++r) {
            const float share = exp2_fast(bests_of[r * GROUP + head] - shift);
            total += share * totals_of[r * GROUP + head];
            value += share * values_of[r * SHARE + i];
        }
        to[rank * SHARE + i] = to_element(total > 0.0f ? value / total : 0.0f);
    }
}
