// Paged causal attention for prefill and mixed steps on compute capability 9.0 (FlashAttention-3: Shah et al.,
// 2024; online softmax: Milakov & Gimelshein, 2018).
//
// A block stays on its multiprocessor and takes tiles of work from a counter, longest first. A tile is one KV
// head and QUERIES tokens of one sequence; its 128 rows are those tokens times the GROUP query heads of the KV
// head, so that all of them share K and V, and a sequence with one token costs one tile a KV head.
//
// Of warp group 0, one warp copies Q and K and one V, in tiles of 128 keys, page by page through tensor maps,
// STAGES tiles ahead; one finds the next tile of work meanwhile. Warp groups 1 and 2 compute 64 rows each. The
// product of a tile with V is started with the scores of the next, and the two groups take turns in starting
// products, so that one's softmax runs under the other's products. Keys are taken from the last to the first:
// only the tiles on the diagonal, at the end of the sequence and at the window's edge are masked.
//
// Tiles of the sequences are numbered without a table: sequence b starts at tile cu_seqlens[b] / QUERIES + b.
//
// With PART (tiles of keys; 0: without) every PART tiles of keys, counted from the sequence's first, have a sum of
// their own, and these are joined from the last to the first, in every step alike: a row's bits then do not depend on
// who computes it. Where there is little work, blocks share a sequence's parts and the last to end joins them; else
// a block has all of them.
//
// Constants: HEADS, GROUP, D (64, 128), PAGE (8 to 128, a power of two), COLUMNS of the block table, WINDOW,
// SOFTCAP, SINKS, HALF (float16 instead of bfloat16), STAGES; PART, ITEMS (most parts that blocks share); RESULT_CODE
// (the result is codes of the scale `y_scale`: e4m3 1, int8 2; 0: elements).
#include "hopper_copies.cuh"
#include "codes.cuh"
#include "sinks.cuh"

static_assert(!(RESULT_CODE && HALF), "codes are of rounded bfloat16");

template <bool VALUE>
struct Flag {
    static constexpr bool value = VALUE;
};

// Of this thread: rows `lane / 4` and `lane / 4 + 8` of its warp's 16; of each 8 columns, 2 * (lane % 4) and
// the next. Element 4 * j + 2 * r + e is row r, column 8 * j + 2 * (lane % 4) + e.
struct Rows {
    float best[2], sum[2];
    int position[2];  // last key that the row sees
};

template <bool MASKED>
DEVICE void softmax(float (&s)[64], Rows& rows, float (&alpha)[2], int key0, float scale, float softcap) {
    const float factor = SOFTCAP ? 1.0f : scale * LOG2_E;
    if (SOFTCAP) {
        // softcap * tanh(s * scale / softcap) in units of log2(e); tanh(u) = 1 - 2 / (exp(2 u) + 1).
        const float inner = 2.0f * LOG2_E * scale / softcap, outer = softcap * LOG2_E;
#pragma unroll
        for (int i = 0; i < 64; ++i) s[i] = outer - outer * __fdividef(2.0f, exp2_fast(s[i] * inner) + 1.0f);
    }
    if (MASKED) {
        const int column = key0 + 2 * (threadIdx.x % 4);
#pragma unroll
        for (int i = 0; i < 64; ++i) {
            const int key = column + 8 * (i / 4) + i % 2, position = rows.position[i / 2 % 2];
            const bool seen = key <= position && (WINDOW == 0 || key > position - WINDOW);
            s[i] = seen ? s[i] : -INFINITE;
        }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float best = rows.best[r];
#pragma unroll
        for (int j = 0; j < 16; ++j) best = fmaxf(best, fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
        best = fmaxf(best, __shfl_xor_sync(~0u, best, 1));
        best = fmaxf(best, __shfl_xor_sync(~0u, best, 2));
        // A row that has seen no key yet has -inf, and -inf - -inf is NaN.
        const float shift = MASKED && best == -INFINITE ? 0.0f : __fmul_rn(best, factor);
        // Exactly 1 where the best is the same: a tile of which a row sees nothing must not change it.
        alpha[r] = exp2_fast(__fsub_rn(__fmul_rn(rows.best[r], factor), shift));
        rows.best[r] = best;
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < 16; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float& x = s[4 * j + 2 * r + e];
                x = exp2_fast(__fmaf_rn(x, factor, -shift));
                sum += x;
            }
        }
        rows.sum[r] = __fmaf_rn(rows.sum[r], alpha[r], sum);
    }
}

DEVICE void pack_scores(const float (&s)[64], u32 (&p)[32]) {
#pragma unroll
    for (int i = 0; i < 32; ++i) p[i] = pack(s[2 * i], s[2 * i + 1]);
}

DEVICE void start_scores(float (&s)[64], u32 q, u32 k) {
    const u64 a = matrix(q, 8 * ROW_BYTES, 16), b = matrix(k, 8 * ROW_BYTES, 16);
    product_fence();
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
        const u32 offset = (i / 4 * CHUNK_BYTES + i % 4 * 32) >> 4;
        product_nt(s, a + offset, b + offset, i > 0);
    }
    product_commit();
}

DEVICE void start_values(float (&o)[D / 2], const u32 (&p)[32], u32 v) {
    const u64 b = matrix(v, v_place(8), V_CHUNK_BYTES);
    product_fence();
#pragma unroll
    for (int i = 0; i < KEYS / 16; ++i) product_nn(o, p + 4 * i, b + (v_place(16 * i) >> 4));
    product_commit();
}

// Slots of a page past the end of the sequence hold anything, and 0 * NaN would spread: zeros instead.
DEVICE void clear_unused(u32 v, int keys_in_tile, int group) {
    const int n = ((keys_in_tile + BOX - 1) / BOX * BOX - keys_in_tile) * CHUNKS * 8;
    for (int i = threadIdx.x % 128; i < n; i += 128) {
        const u32 at = v + v_place(keys_in_tile + i / (CHUNKS * 8)) + i % CHUNKS * V_CHUNK_BYTES + i / CHUNKS % 8 * 16;
        asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
    }
    fence_async();
    named_sync(3 + group, 128);
}

// `factor`: of scores, to log2(e) times what the softmax is of.
DEVICE void store(const float (&o)[D / 2], const Rows& rows, const Work& work, int row0, unsigned short* out,
                  float y_scale, float factor, const float* sinks) {
    const float to_code = RESULT_CODE ? 1.0f / y_scale : 1.0f;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float sum = rows.sum[r];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        sum = with_sink(sum, sinks + work.kv_head * GROUP + (row0 + 8 * r) % GROUP, rows.best[r] * factor);
        const float inverse = sum == 0.0f ? 0.0f : __fdividef(1.0f, sum);
        const int row = row0 + 8 * r, query = work.first_query + row / GROUP;
        const bool exists = row < QUERIES * GROUP && query < work.queries;
        const long long head = (long long)(work.token + query) * HEADS + work.kv_head * GROUP + row % GROUP;
        const long long target = head * D + threadIdx.x % 4 * 8;
#pragma unroll
        for (int j = 0; j < D / 32; ++j) {
            u32 w[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int at = 16 * j + 4 * i + 2 * r;
                w[i] = pack(o[at] * inverse, o[at + 1] * inverse);
                if (RESULT_CODE)
                    w[i] = to_codes<RESULT_CODE>(__uint_as_float(w[i] << 16) * to_code,
                                                 __uint_as_float(w[i] & 0xffff0000) * to_code);
            }
            transpose(w);
            if (!exists) continue;
            if (RESULT_CODE)
                *reinterpret_cast<uint2*>(reinterpret_cast<unsigned char*>(out) + target + 32 * j) =
                    make_uint2(w[0] | w[1] << 16, w[2] | w[3] << 16);
            else *reinterpret_cast<uint4*>(out + target + 32 * j) = make_uint4(w[0], w[1], w[2], w[3]);
        }
    }
}

// ---- Sums of parts, in scratch memory ----

// Of a thread: D / 2 sums, and the two rows' best and sum of weights; `stride` threads have theirs beside one another.
constexpr int KEPT = D / 2 + 4;

DEVICE void keep(float* at, int stride, const float (&o)[D / 2], const Rows& rows) {
#pragma unroll
    for (int i = 0; i < D / 2; ++i) __stcg(at + i * stride, o[i]);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        __stcg(at + (D / 2 + r) * stride, rows.best[r]);
        __stcg(at + (D / 2 + 2 + r) * stride, rows.sum[r]);
    }
}

// (o, rows): the sums kept `before` joined by them (FIRST), or they by those kept. A part of which a row sees nothing
// changes nothing.
template <bool FIRST>
DEVICE void join(const float* kept, int stride, float (&o)[D / 2], Rows& rows, float factor) {
    float own[2], other[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float best_kept = __ldcg(kept + (D / 2 + r) * stride), best = fmaxf(rows.best[r], best_kept);
        const float sum_kept = __ldcg(kept + (D / 2 + 2 + r) * stride);
        const float shift = best == -INFINITE ? 0.0f : __fmul_rn(best, factor);
        own[r] = exp2_fast(__fsub_rn(__fmul_rn(rows.best[r], factor), shift));
        other[r] = exp2_fast(__fsub_rn(__fmul_rn(best_kept, factor), shift));
        rows.best[r] = best;
        rows.sum[r] = FIRST ? __fmaf_rn(sum_kept, other[r], __fmul_rn(rows.sum[r], own[r]))
                            : __fmaf_rn(rows.sum[r], own[r], __fmul_rn(sum_kept, other[r]));
    }
#pragma unroll
    for (int i = 0; i < D / 2; ++i) {
        const float x = __ldcg(kept + i * stride);
        const int r = i / 2 % 2;
        o[i] = FIRST ? __fmaf_rn(x, other[r], __fmul_rn(o[i], own[r])) : __fmaf_rn(o[i], own[r], __fmul_rn(x, other[r]));
    }
}

// By the warp that has the rows of a part which blocks share: the last one joins all.
DEVICE void share_part(float* scratch, u32* counter, const Work& work, float (&o)[D / 2], Rows& rows, int row0,
                       unsigned short* out, float y_scale, float factor, int items, const float* sinks) {
    const int lane = threadIdx.x % 32;
    // Parts of one tile of work lie `items` apart.
    auto place = [&](int part) { return scratch + (long long)(part * items + work.item) * (KEPT * 32) + lane; };
    keep(place(work.part), 32, o, rows);
    __threadfence();
    __syncwarp();
    int before = 0;
    if (lane == 0) before = atomicAdd(counter + 1 + work.item, 1u);
    if (__shfl_sync(~0u, before, 0) != work.parts - 1) return;
    __threadfence();
    if (lane == 0) atomicExch(counter + 1 + work.item, 0u);
    const float* last = place(work.parts - 1);
#pragma unroll
    for (int i = 0; i < D / 2; ++i) o[i] = __ldcg(last + i * 32);
#pragma unroll
    for (int r = 0; r < 2; ++r) rows.best[r] = __ldcg(last + (D / 2 + r) * 32), rows.sum[r] = __ldcg(last + (D / 2 + 2 + r) * 32);
    for (int part = work.parts - 2; part >= 0; --part) join<false>(place(part), 32, o, rows, factor);
    store(o, rows, work, row0, out, y_scale, factor, sinks);
}

DEVICE void compute(const Shared& shared, const Work* next_work, unsigned short* out, float y_scale, float scale,
                    float softcap, int group, float* scratch, u32* counter, int items, const float* sinks) {
    const int lane = threadIdx.x % 32;
    const int row0 = group * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4;
    const u32 q = shared.base + group * 64 * ROW_BYTES;
    Ring k_ring, v_ring;
    u32 q_parity = 0;
    if (group == 1) named_arrive(1, 256);  // the first turn is group 0's

    auto release = [&](int empty, u32 stage = 0) {
        if (lane == 0) barrier_arrive(shared.barrier(empty, stage));
    };
    // By every lane that has read the tile of work.
    auto release_q = [&] { barrier_arrive(shared.barrier(Q_EMPTY)); };

    while (true) {
        barrier_wait(shared.barrier(Q_FULL), q_parity);
        q_parity ^= 1;
        const Work work = *next_work;
        if (work.tiles < 0) return;
        const bool both = work.first_query + 64 / GROUP < work.queries;  // whether group 1 has rows
        if (group == 1 && !both) {
            __syncwarp();
            release_q();
            for (int i = 0; i < work.tiles; ++i) {
                barrier_wait(shared.barrier(K_FULL, k_ring.stage), k_ring.parity);
                release(K_EMPTY, k_ring.stage);
                k_ring.next();
                barrier_wait(shared.barrier(V_FULL, v_ring.stage), v_ring.parity);
                release(V_EMPTY, v_ring.stage);
                v_ring.next();
            }
            continue;
        }
        float o[D / 2], s[64], alpha[2];
        u32 p[32];
        Rows rows;
        const int context = work.context();
        const float factor = SOFTCAP ? 1.0f : scale * LOG2_E;
        auto begin = [&] {
#pragma unroll
            for (int i = 0; i < D / 2; ++i) o[i] = 0.0f;
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                rows.best[r] = -INFINITE;
                rows.sum[r] = 0.0f;
                rows.position[r] = context + work.first_query + (row0 + 8 * r) / GROUP;
            }
        };
        begin();
        if (work.tiles == 0) {
            __syncwarp();
            release_q();
            store(o, rows, work, row0, out, y_scale, factor, sinks);
            continue;
        }
        // Tiles of keys that every query sees whole: [seen_from, seen_to).
        const int lowest = context + work.first_query, highest = lowest + QUERIES - 1;
        const int seen_to = (lowest + 1) / KEYS;
        const int seen_from = WINDOW > 0 ? (max(highest - WINDOW + 1, 0) + KEYS - 1) / KEYS : 0;
        const int first = work.last - work.tiles + 1;

        // The scores of `tile` and the values of the one before it.
        auto step = [&](int tile, auto masked) {
            barrier_wait(shared.barrier(K_FULL, k_ring.stage), k_ring.parity);
            if (both) named_sync(1 + group, 256);
            pin(s);
            start_scores(s, q, shared.k(k_ring.stage));
            barrier_wait(shared.barrier(V_FULL, v_ring.stage), v_ring.parity);
            pin(o);
            pin(p);
            start_values(o, p, shared.v(v_ring.stage));
            if (both) named_arrive(2 - group, 256);
            product_wait<1>();
            pin(s);
            release(K_EMPTY, k_ring.stage);
            k_ring.next();
            if (tile == first) release_q();
            softmax<masked.value>(s, rows, alpha, tile * KEYS, scale, softcap);
            product_wait<0>();
            pin(o);
            pin(p);
            release(V_EMPTY, v_ring.stage);
            v_ring.next();
#pragma unroll
            for (int i = 0; i < D / 2; ++i) o[i] *= alpha[i / 2 % 2];
            pack_scores(s, p);
        };
        // Tiles `last` to `from`.
        auto tiles = [&](int last, int from) {
            barrier_wait(shared.barrier(K_FULL, k_ring.stage), k_ring.parity);
            start_scores(s, q, shared.k(k_ring.stage));
            product_wait<0>();
            pin(s);
            release(K_EMPTY, k_ring.stage);
            k_ring.next();
            if (last == first) release_q();
            softmax<true>(s, rows, alpha, last * KEYS, scale, softcap);
            pack_scores(s, p);
            const int in_last = work.keys - last * KEYS;
            if (in_last < KEYS && in_last % BOX != 0) {
                barrier_wait(shared.barrier(V_FULL, v_ring.stage), v_ring.parity);
                clear_unused(shared.v(v_ring.stage), in_last, group);
            }
            int tile = last - 1;
            for (; tile >= from && tile >= seen_to; --tile) step(tile, Flag<true>());
            for (; tile >= from && tile >= seen_from; --tile) step(tile, Flag<false>());
            if (WINDOW > 0)
                for (; tile >= from; --tile) step(tile, Flag<true>());
            barrier_wait(shared.barrier(V_FULL, v_ring.stage), v_ring.parity);
            pin(o);
            pin(p);
            start_values(o, p, shared.v(v_ring.stage));
            product_wait<0>();
            pin(o);
            release(V_EMPTY, v_ring.stage);
            v_ring.next();
        };
        float* kept = scratch + blockIdx.x * (KEPT * 256) + threadIdx.x - 128;
        for (int last = work.last;;) {
            const int from = PART ? last / SPAN * SPAN : first;
            tiles(last, from);
            if (!PART || work.parts > 1) break;
            if (last != work.last) join<true>(kept, 256, o, rows, factor);
            if (from == 0) break;
            keep(kept, 256, o, rows);
            begin();
            last = from - 1;
        }
        if (PART && work.parts > 1) {
            if (group == 0 && threadIdx.x % 128 < 32)
                share_part(scratch + gridDim.x * (KEPT * 256), counter, work, o, rows, row0, out, y_scale, factor, items,
                           sinks);
            continue;
        }
        store(o, rows, work, row0, out, y_scale, factor, sinks);
    }
}

extern "C" __global__ void __launch_bounds__(384, 1)
    attention(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k_cache,
              const __grid_constant__ TensorMap v_cache, const int* block_table, const int* cu_seqlens,
              const int* seq_lens, unsigned short* out, u32* counter, float* scratch, int sequences, float scale,
              float softcap, float y_scale SINKS_PARAMETER) {
    extern __shared__ unsigned char memory[];
    const u32 unaligned = shared_address(memory);
    const Shared shared{(unaligned + 1023) / 1024 * 1024};
    Work* next = reinterpret_cast<Work*>(memory + (shared.base - unaligned) + WORK_AT);
    Work* current = next + 1;
    if (threadIdx.x == 0) {
        prefetch_map(&q);
        prefetch_map(&k_cache);
        prefetch_map(&v_cache);
        // Eight warps compute, and each says when it is through with a tile of keys. Of tiles of work every lane
        // that has read one says so.
        barrier_init(shared.barrier(WORK_FULL), 1);
        barrier_init(shared.barrier(WORK_EMPTY), 2 * 32);
        barrier_init(shared.barrier(Q_FULL), 1);
        barrier_init(shared.barrier(Q_EMPTY), 8 * 32);
        for (u32 i = 0; i < STAGES; ++i) {
            barrier_init(shared.barrier(K_FULL, i), 1);
            barrier_init(shared.barrier(K_EMPTY, i), 8);
            barrier_init(shared.barrier(V_FULL, i), 1);
            barrier_init(shared.barrier(V_EMPTY, i), 8);
        }
        barrier_init_fence();
    }
    __syncthreads();
    wait_for_previous();
    if (threadIdx.x < 128) {
        registers_less<40>();
        if (threadIdx.x < 32) {
            copy_q_and_k(shared, next, current, &q, &k_cache, block_table);
        } else if (threadIdx.x < 64) {
            copy_v(shared, next, &v_cache, block_table);
        } else if (threadIdx.x < 96) {
            find_work(shared, next, cu_seqlens, seq_lens, counter, sequences);
        }
    } else {
        registers_more<232>();
        compute(shared, current, out, y_scale, scale, softcap, threadIdx.x / 128 - 1, scratch, counter,
                (cu_seqlens[sequences] / QUERIES + sequences) * KV_HEADS, SINKS_GIVEN);
    }
}
