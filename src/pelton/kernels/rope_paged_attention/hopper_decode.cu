// rope_paged_attention of a few sequences with one token each, on compute capability 9.0: one launch, in which
// nothing goes through global memory but the operands.
//
// A cluster of CLUSTER blocks has one KV head of one sequence. Its warps take tiles of KEYS keys in turn, each warp
// for itself: it copies them to its own part of shared memory, STAGES tiles ahead, and keeps its own online
// softmax (Milakov & Gimelshein, 2018). The first copies begin before the kernel ahead of this one has ended: they
// are of earlier steps, and the step's tables were there before its first kernel. Then each warp rotates the group's
// queries, in registers. A warp more in each block rotates the new key and scores it; the last block's stores it and
// its value. At the end each warp sends every block the part of its result that the block joins: after the kernel ahead
// has ended, threads wait for each other only there.
//
// Caches hold elements, or codes of 8 bits (KV_CODE) with a scale a KV head (K_SCALED, V_SCALED) or none, of keys less a
// vector, rounded as their queries would have it (SHIFTED).
//
// Constants: KV_HEADS, GROUP (query heads of a KV head, up to 16), D (64, 128), TURN (half the dimensions that
// rotate, a multiple of 8), PAGE (8 to 128, a power of two), COLUMNS of the block table, Q_ROW, K_ROW, V_ROW and
// Q_HEAD, K_HEAD, V_HEAD (strides, elements, multiples of 8), WINDOW, SOFTCAP, SINKS, HALF (float16 instead of
// bfloat16), NORM_Q, NORM_K (whether heads are normalised first), WEIGHTS32 (whether the norms' weights are float32),
// CLUSTER (1 to 8), WARPS (4 or 8), STAGES, RESULT_CODE (the result is codes of the scale `y_scale`: e4m3 1, int8 2; 0:
// elements).
#include "hopper_decode_parts.cuh"
#if SHIFTED
#include "hopper_decode_shifted.cuh"
#else
struct Rounding {};
#endif

constexpr int THREADS = 32 * (WARPS + 1);
// As if there were more threads, where they would leave no registers for a block of the product before.
constexpr int BOUND = WARPS > 4 && THREADS < 416 ? 416 : THREADS;
constexpr int TABLE = PAGE < KEYS ? KEYS / PAGE : 1;  // entries of the block table that a tile's keys lie in
constexpr int HEADS = KV_HEADS * GROUP;
constexpr int COPIED = 16 / sizeof(Cached), COPIES = D / COPIED;  // numbers that are copied together, such of a head

DEVICE void copy_chunk(u32 target, const void* source) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
}

DEVICE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING>
DEVICE void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

DEVICE void launch_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

DEVICE void prefetch(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

// The step's token of the sequence and KV head.
struct Token {
    bool there;  // whether it has a slot; without one its key and value are in the caches
    const u16 *k, *v;
    Cached *k_slot, *v_slot;  // where they go; null: another block stores them
    const Weight* k_weight;
    float k_scale, v_scale;
    Rounding rounding;
};

// The new key's scores and the new value, for `join`.
DEVICE void attend_to(const Token& token, u32 base, const u32 (&q)[EIGHTS][SLOTS][4], const Angles& angles, float eps,
                      float scale, float softcap) {
    const int lane = threadIdx.x % 32;
    const bool has_value = lane < CHUNKS, has_key = lane < 4;
    uint4 elements = make_uint4(0, 0, 0, 0);
    if (token.there && has_value) elements = reinterpret_cast<const uint4*>(token.v)[lane];
    // The first of 16 keys; of the others there are none (or, SHIFTED, the same again), and no score is read.
    u32 rotated[SLOTS][4], key[SLOTS][4];
    const u32 none[SLOTS][4] = {};
    rotate<NORM_K>(rotated, token.k, token.there && (SHIFTED || has_key), token.k_weight, angles, eps);
#if SHIFTED
    const NewKey codes(rotated, token.k_scale, token.rounding);
    if (token.k_slot) codes.store(token.k_slot, token.rounding);
    codes.gather(key);
#else
#pragma unroll
    for (int slot = 0; slot < SLOTS; ++slot) {
        const int at = 8 * chunk_of(slot);
        const NewChunk chunk(rotated[slot], token.k_scale);
#pragma unroll
        for (int i = 0; i < 4; ++i) key[slot][i] = chunk.words[i];
        if (has_key && token.k_slot) chunk.store(token.k_slot + at);
    }
#endif
    const u32 words[4] = {elements.x, elements.y, elements.z, elements.w};
    const NewChunk value(words, token.v_scale);
    if (has_value) {
        if (token.v_slot) value.store(token.v_slot + 8 * lane);
#pragma unroll
        for (int i = 0; i < 8; ++i) put(base + VALUE_AT + 4 * (8 * lane + i), value.number(i));
    }
#pragma unroll
    for (int n = 0; n < EIGHTS; ++n) {
        float s[4];
        score(s, key, none, q[n]);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float x = token.there ? scaled(s[i], scale, softcap) : NEGATIVE_INFINITY;
            if (has_key) put(base + NEW_AT + 4 * (8 * n + 2 * lane + i), x);
        }
    }
    barrier_arrive(base + BARRIER_AT);
}

extern "C" __global__ void __launch_bounds__(BOUND) __cluster_dims__(CLUSTER, 1, 1)
    decode(const u16* q, const u16* k, const u16* v, const float* cos_sin, Cached* k_cache, Cached* v_cache,
           const int* slots, const int* block_table, const int* seq_lens, const Weight* q_weight,
           const Weight* k_weight, const float* k_scale, const float* v_scale,
#if SHIFTED
           const float* k_shift, const float* k_queries,
#endif
           u16* out, float eps, float scale, float softcap, float y_scale SINKS_PARAMETER) {
    extern __shared__ __align__(128) unsigned char memory[];
    const u32 base = shared_address(memory);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int rank = blockIdx.x, kv_head = blockIdx.y;
    const long long b = blockIdx.z;
    if (threadIdx.x == 0) {
        barrier_init(base + BARRIER_AT, ARRIVALS);
        barrier_init_fence();
    }
    __syncthreads();  // so that racecheck sees their order: it takes the first for the whole warp's
    if (CLUSTER > 1 && threadIdx.x == 0) barrier_expect(base + BARRIER_AT, SENT_BYTES);
    cluster_arrive();
    const float* turn = cos_sin + b * (2 * TURN);
    // A layer's weights have pushed the angles out of L2 since the layer before.
    if (warp == WARPS && lane * 32 < 2 * TURN) prefetch(turn + lane * 32);
    const float* own_sinks = SINKS_GIVEN + (SINKS ? kv_head * GROUP : 0);
    if (SINKS && threadIdx.x == 0) prefetch(own_sinks);
    const int n_keys = seq_lens[b], slot = slots[b];
    // Keys in the cache, and the first that the token sees. A token without a slot is in the cache itself.
    const int cached = slot >= 0 ? n_keys - 1 : n_keys;
    const int first = WINDOW > 0 && n_keys > WINDOW ? n_keys - WINDOW : 0;
    const int tiles = cached > first ? (cached + KEYS - 1) / KEYS : 0;
    constexpr int TURNS = CLUSTER * WARPS;
    const int begin = first / KEYS + warp * CLUSTER + rank;
    const int* table = block_table + b * COLUMNS;
    const u32 ring = base + warp * (STAGES * STAGE_BYTES);

    struct Blocks {
        int of[TABLE];
    };
    // The blocks of a tile, which may be one that there is not.
    auto look_up = [&](int tile) {
        Blocks blocks;
#pragma unroll
        for (int i = 0; i < TABLE; ++i) blocks.of[i] = table[min(tile * KEYS / PAGE + i, COLUMNS - 1)];
        return blocks;
    };
    auto copy_tile = [&](int tile, int stage, const Blocks& blocks) {
        if (tile < tiles) {
#pragma unroll
            for (int i = 0; i < KEYS * COPIES / 32; ++i) {
                const int row = (i * 32 + lane) / COPIES, chunk = lane % COPIES;
                // Beyond the end the last key again, before the window its first: what is there may be anything,
                // NaN too, and blocks that are wholly outside the window are not there at all.
                const int key = min(max(tile * KEYS + row, first), cached - 1);
                long long block = blocks.of[0];
#pragma unroll
                for (int page = 1; page < TABLE; ++page)
                    if (key / PAGE == tile * TABLE + page) block = blocks.of[page];
                const long long at = ((block * KV_HEADS + kv_head) * PAGE + key % PAGE) * D + COPIED * chunk;
                const u32 target = ring + stage * STAGE_BYTES;
                copy_chunk(target + key_place(row, chunk), k_cache + at);
                copy_chunk(target + TILE_BYTES + value_place(row, chunk), v_cache + at);
            }
        }
        copies_commit();  // none, too: groups are counted
    };
    // Looked up ahead of the copies, and those of the loop a turn ahead, so that copies wait for nothing.
    Blocks ahead[STAGES + 1] = {};
    if (warp < WARPS) {
#pragma unroll
        for (int stage = 0; stage <= STAGES; ++stage) ahead[stage] = look_up(begin + stage * TURNS);
#pragma unroll
        for (int stage = 0; stage < STAGES; ++stage) copy_tile(begin + stage * TURNS, stage, ahead[stage]);
    }
    cluster_wait();  // until all barriers are there

    const float key_scale = K_SCALED ? k_scale[kv_head] : 1.0f, value_scale = V_SCALED ? v_scale[kv_head] : 1.0f;
    scale *= key_scale;
    Rounding rounding;
#if SHIFTED
    if (warp == WARPS) rounding.load(k_shift, k_queries, kv_head);
#endif

    wait_for_previous();
    // The kernel behind this one begins to read weights as soon as it can. What this one is waiting for would wait behind
    // them: so it begins when the last keys, and the queries, have been asked for.
    const auto are_last = [&](int tile) { return tile < tiles && tile + TURNS >= tiles; };  // of the warp's copies
    if (threadIdx.x == 0 && begin + STAGES * TURNS >= tiles) launch_next();
    const Angles angles(turn);
    u32 queries[EIGHTS][SLOTS][4];
#pragma unroll
    for (int n = 0; n < EIGHTS; ++n) {
        const int head = 8 * n + lane / 4;
        const u16* x = q + b * Q_ROW + (kv_head * GROUP + head) * Q_HEAD;
        rotate<NORM_Q>(queries[n], x, head < GROUP, q_weight, angles, eps);
#pragma unroll
        for (int slot = 0; slot < SLOTS; ++slot)
#pragma unroll
            for (int i = 0; i < 4; ++i) queries[n][slot][i] = operands_of(queries[n][slot][i]);
    }
    if (warp == WARPS) {
        const long long at = (((long long)(slot / PAGE) * KV_HEADS + kv_head) * PAGE + slot % PAGE) * D;
        const bool stores = slot >= 0 && rank == CLUSTER - 1;
        const Token token{slot >= 0,
                          k + b * K_ROW + kv_head * K_HEAD,
                          v + b * V_ROW + kv_head * V_HEAD,
                          stores ? k_cache + at : nullptr,
                          stores ? v_cache + at : nullptr,
                          k_weight,
                          key_scale,
                          value_scale,
                          rounding};
        attend_to(token, base, queries, angles, eps, scale, softcap);
        return;
    }
    Part part;
    int stage = 0;
    Blocks next = ahead[STAGES];
    for (int tile = begin; tile < tiles; tile += TURNS) {
        const Blocks blocks = next;
        if (tile + (STAGES + 1) * TURNS < tiles) next = look_up(tile + (STAGES + 1) * TURNS);
        copies_wait<STAGES - 1>();
        __syncwarp();
        part.attend(queries, ring + stage * STAGE_BYTES, first - tile * KEYS, cached - tile * KEYS, scale, softcap);
        __syncwarp();
        copy_tile(tile + STAGES * TURNS, stage, blocks);
        if (threadIdx.x == 0 && are_last(tile + STAGES * TURNS)) launch_next();
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    copies_wait<0>();
    part.send(base, rank * WARPS + warp);
    barrier_wait(base + BARRIER_AT, 0);
    join(base, value_scale, y_scale, own_sinks, out, (b * HEADS + kv_head * GROUP) * D + rank * OWN);
}
