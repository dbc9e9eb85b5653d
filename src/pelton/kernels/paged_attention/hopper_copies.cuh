// Of hopper_attention.cu: what lies in shared memory, and the warps that find work and copy Q, K and V.
#pragma once
#include "hopper.cuh"

constexpr int KV_HEADS = HEADS / GROUP;
constexpr int ROWS = 128, KEYS = 128;
constexpr int LEAD = 3;  // tiles of keys before the end of its work at which a block asks for more
constexpr int QUERIES = ROWS / GROUP;
constexpr int CHUNKS = D / 64;                  // 128-byte columns of a row
constexpr int BOX = PAGE < KEYS ? PAGE : KEYS;  // keys of one copy
constexpr int BOXES = KEYS / BOX;
constexpr u32 ROW_BYTES = 128, CHUNK_BYTES = KEYS * ROW_BYTES, TILE_BYTES = CHUNKS * CHUNK_BYTES;
// K lies by chunk and key, V by box, chunk, key: one copy takes all chunks of a box.
constexpr u32 V_CHUNK_BYTES = BOX * ROW_BYTES;
__device__ constexpr u32 v_place(int key) {
    return key / BOX * (CHUNKS * BOX * ROW_BYTES) + key % BOX * ROW_BYTES;
}
constexpr u32 Q_BYTES = QUERIES * GROUP * D * 2;
static_assert(BOXES * CHUNKS <= 32 && ROWS == KEYS, "a lane copies one box; Q is laid out like K");
constexpr float LOG2_E = 1.4426950408889634f;
#define INFINITE __int_as_float(0x7f800000)

// A tile of work, or of its keys a part.
struct Work {
    int tiles;        // of keys; -1: there is no more work
    int last;         // the tile of keys that is taken first
    int first_query;  // of the sequence
    int sequence, queries, keys, token;  // its number, sizes and first row
    int kv_head;
    int part, parts;  // of the keys, which blocks share; parts 1: none do
    u32 item;         // its number, without parts

    DEVICE int context() const { return keys - queries; }
    // Keys that some query of the tile sees: [first_key, end_key).
    DEVICE int end_key() const { return min(context() + first_query + QUERIES, keys); }
    DEVICE int first_key() const { return WINDOW > 0 ? max(context() + first_query - WINDOW + 1, 0) : 0; }
};

// Shared memory, from an address that is a multiple of 1024: Q, K and V by stage, barriers, the tile of work that
// is copied next and the one that is computed next.
constexpr u32 K_AT = TILE_BYTES, V_AT = K_AT + STAGES * TILE_BYTES, BARRIERS_AT = V_AT + STAGES * TILE_BYTES;
enum Barrier {
    WORK_FULL, WORK_EMPTY, Q_FULL, Q_EMPTY, K_FULL, K_EMPTY = K_FULL + STAGES, V_FULL = K_EMPTY + STAGES,
    V_EMPTY = V_FULL + STAGES, N_BARRIERS = V_EMPTY + STAGES
};
constexpr u32 WORK_AT = BARRIERS_AT + 192;
static_assert(N_BARRIERS * 8 <= 192 && 192 + 2 * sizeof(Work) <= 320, "room of the barriers and of work");

// With PART: blocks share a sequence's keys where it has at most so many rows, those of a warp.
constexpr int SHARED_ROWS = 16, SPAN = PART ? PART : 1 << 20;
static_assert(!PART || WINDOW == 0, "parts of all keys");

struct Shared {
    u32 base;
    DEVICE u32 barrier(int which, u32 stage = 0) const { return base + BARRIERS_AT + 8 * (which + stage); }
    DEVICE u32 k(u32 stage) const { return base + K_AT + stage * TILE_BYTES; }
    DEVICE u32 v(u32 stage) const { return base + V_AT + stage * TILE_BYTES; }
};

// The place in a ring of STAGES tiles.
struct Ring {
    u32 stage = 0, parity = 0;
    DEVICE void next() {
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        parity ^= stage == 0;
    }
};

// ---- The warp that finds work ----

// The last of 0 to n - 1 for which `holds`, which is true up to there: 32 guesses at a time.
template <class Condition>
DEVICE int last_where(int n, Condition holds) {
    const int lane = threadIdx.x % 32;
    int low = 0;
    while (n > 1) {
        const int step = (n + 31) / 32, guess = low + lane * step;
        const int found = __popc(__ballot_sync(~0u, lane * step < n && holds(guess))) - 1;
        low += found * step;
        n = min(step, n - found * step);
    }
    return low;
}

// Parts of the longest sequence, where there is so little work that blocks share keys; else 1.
DEVICE u32 parts_of_longest(const int* seq_lens, u32 total, int sequences) {
    if (!PART || 2 * total > gridDim.x || sequences > 32) return 1;
    int keys = threadIdx.x % 32 < sequences ? seq_lens[threadIdx.x % 32] : 0;
#pragma unroll
    for (int i = 16; i > 0; i /= 2) keys = max(keys, __shfl_xor_sync(~0u, keys, i));
    const u32 parts = max(((keys + KEYS - 1) / KEYS + SPAN - 1) / SPAN, 1);
    return total * parts <= ITEMS ? parts : 1;
}

DEVICE void find_work(const Shared& shared, Work* next, const int* cu_seqlens, const int* seq_lens, u32* counter,
                      int sequences) {
    const int lane = threadIdx.x % 32;
    const int slots = cu_seqlens[sequences] / QUERIES + sequences;
    // Sequences of one token, which stand first, wait for memory and the others for products: they are taken in
    // turns. Of the others the last tiles see the most keys: they come first, so that none is left alone.
    const int ones = last_where(sequences + 1, [&](int i) { return cu_seqlens[i] == i; });
    const u32 total = slots * KV_HEADS, first = min((ones / QUERIES + ones) * KV_HEADS, total);
    const u32 paired = min(first, total - first), parts = parts_of_longest(seq_lens, total, sequences);
    u32 parity = 1;  // the first wait is over at once
    Work work;
    do {
        barrier_wait(shared.barrier(WORK_EMPTY), parity);
        parity ^= 1;
        while (true) {
            u32 index = 0;
            if (lane == 0) index = atomicAdd(counter, 1u);
            index = __shfl_sync(~0u, index, 0);
            if (index >= total * parts) {
                // Each block takes one number too many; the last one leaves the counter as it was.
                if (lane == 0 && index == total * parts + gridDim.x - 1) atomicExch(counter, 0u);
                work.tiles = -1;
                break;
            }
            work.part = index / total, work.item = index %= total;
            const bool one = index < 2 * paired ? index % 2 : first > paired;
            index = index < 2 * paired ? index / 2 : index - paired;
            const int slot = one ? index / KV_HEADS : slots - 1 - index / KV_HEADS;
            const int b = last_where(sequences, [&](int i) { return cu_seqlens[i] / QUERIES + i <= slot; });
            work.kv_head = index % KV_HEADS;
            work.sequence = b;
            work.token = cu_seqlens[b];
            work.queries = cu_seqlens[b + 1] - work.token;
            work.first_query = (slot - (work.token / QUERIES + b)) * QUERIES;
            if (work.first_query >= work.queries) continue;
            work.keys = seq_lens[b];
            const int end = work.end_key();
            work.last = (end + KEYS - 1) / KEYS - 1;
            work.tiles = end > 0 ? work.last - work.first_key() / KEYS + 1 : 0;
            const bool few = (work.queries - work.first_query) * GROUP <= SHARED_ROWS;
            work.parts = parts > 1 && few ? (work.tiles + SPAN - 1) / SPAN : 1;
            if (work.part >= max(work.parts, 1)) continue;
            if (work.parts > 1) {
                work.last = min(work.last, (work.part + 1) * SPAN - 1);
                work.tiles = work.last - work.part * SPAN + 1;
            }
            break;
        }
        if (lane == 0) {
            *next = work;
            barrier_arrive(shared.barrier(WORK_FULL));
        }
        __syncwarp();
    } while (work.tiles >= 0);
}

// ---- The copying warps ----

// A row of a cache where `key` of the tile of work lies. Pages that no query sees are not read, nor is the table
// there: a box outside of the cache is filled with zeros.
DEVICE int row_of(const Work& work, const int* block_table, int key) {
    if (key >= work.end_key() || key + BOX <= work.first_key()) return -BOX;
    const int block = block_table[(long long)work.sequence * COLUMNS + key / PAGE];
    return (block * KV_HEADS + work.kv_head) * PAGE + key % PAGE;
}

// Waits until a stage is free and announces a tile.
DEVICE u32 begin_tile(const Shared& shared, int full, int empty, const Ring& ring) {
    barrier_wait(shared.barrier(empty, ring.stage), ring.parity ^ 1);
    const u32 barrier = shared.barrier(full, ring.stage);
    if (threadIdx.x % 32 == 0) barrier_expect(barrier, TILE_BYTES);
    __syncwarp();
    return barrier;
}

DEVICE void copy_q_and_k(const Shared& shared, const Work* next, Work* current, const TensorMap* q_map,
                         const TensorMap* k_map, const int* block_table) {
    const int lane = threadIdx.x % 32, box = lane / CHUNKS, chunk = lane % CHUNKS;
    const bool copies = lane < BOXES * CHUNKS;
    const u32 place = chunk * CHUNK_BYTES + box * BOX * ROW_BYTES;
    Ring ring;
    for (u32 parity = 0;; parity ^= 1) {
        barrier_wait(shared.barrier(WORK_FULL), parity);
        const Work work = *next;
        barrier_wait(shared.barrier(Q_EMPTY), parity ^ 1);
        __syncwarp();
        if (lane == 0) *current = work;
        if (work.tiles < 0) break;
        if (lane == 0) {
            barrier_expect(shared.barrier(Q_FULL), Q_BYTES);
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c)
                copy_3d(shared.base + c * CHUNK_BYTES, q_map, shared.barrier(Q_FULL), c * 64, work.kv_head * GROUP,
                        work.token + work.first_query);
        }
        __syncwarp();
        // The next work is looked for shortly before it is wanted: blocks shall take it when they are nearly done.
        const int ask = max(work.tiles - LEAD, 0);
        int key = work.last * KEYS + box * BOX, row = copies ? row_of(work, block_table, key) : 0;
        for (int i = 0; i < work.tiles || i == 0; ++i, key -= KEYS) {
            if (i == ask) barrier_arrive(shared.barrier(WORK_EMPTY));
            if (i == work.tiles) break;
            const int following = copies && i + 1 < work.tiles ? row_of(work, block_table, key - KEYS) : 0;
            const u32 barrier = begin_tile(shared, K_FULL, K_EMPTY, ring);
            if (copies) copy_2d(shared.k(ring.stage) + place, k_map, barrier, chunk * 64, row);
            ring.next();
            row = following;
        }
    }
    if (lane == 0) barrier_arrive(shared.barrier(Q_FULL));
}

DEVICE void copy_v(const Shared& shared, const Work* next, const TensorMap* v_map, const int* block_table) {
    const int lane = threadIdx.x % 32;
    const bool copies = lane < BOXES;
    Ring ring;
    for (u32 parity = 0;; parity ^= 1) {
        barrier_wait(shared.barrier(WORK_FULL), parity);
        const Work work = *next;
        barrier_arrive(shared.barrier(WORK_EMPTY));
        if (work.tiles < 0) break;
        int key = work.last * KEYS + lane * BOX, row = copies ? row_of(work, block_table, key) : 0;
        for (int i = 0; i < work.tiles; ++i, key -= KEYS) {
            const int following = copies && i + 1 < work.tiles ? row_of(work, block_table, key - KEYS) : 0;
            const u32 barrier = begin_tile(shared, V_FULL, V_EMPTY, ring);
            if (copies) copy_3d(shared.v(ring.stage) + v_place(lane * BOX), v_map, barrier, 0, row, 0);
            ring.next();
            row = following;
        }
    }
}
