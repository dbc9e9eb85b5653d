// Next tokens from logits, by the rules of reference.py, without a sort and without a float that is added up in an
// order of chance.
//
// A row is read in pieces of 1024 logits, a warp each; gridDim.x blocks share a row (blockIdx.y). What needs the whole
// row is done at the end of a kernel by the row's last block (`is_last`).
//   scan       the largest logit, the first with it, and of each piece the sum of its weights. Rows that are greedy,
//              or draw from all tokens, have their token here.
//   histogram  of rows with top_k or top_p: how many logits lie in each of BINS equal ranges below the largest.
//              The counts bound the sum of weights above each bin; so the last token that stays lies in bin `kth`
//              (top_k) or from bin `first` to `last` (top_p).
//   choose     adds up weights above these bins and between them, lists what lies in them, cuts the list where the
//              rules say, and draws. The cut is found by digits of (logit, index), 8 bits at a time: in shared memory,
//              or where the list is longer than ROOM (thousands of equal logits) over the row.
// Weights are the reference's bit for bit, their sums are of integers (2^FRACTION is 1): exact to 2^-FRACTION a weight.
// scan's sums alone, for draws from all tokens, are of floats, in a fixed order.
//
// Constant: V.

#include "cut.cuh"

// ---- The last block ----

DEVICE void give(int token, int* tokens, int* tokens_host) {
    if (threadIdx.x == 0) tokens[blockIdx.y] = tokens_host[blockIdx.y] = token;
}

// The first token at which the running sum exceeds u of the whole: `mass` of each of this thread's pieces. Of tokens
// those count whose rank is at least `edge` and whose weight is at least `least`.
DEVICE int draw(const Logits& logits, const u64 (&mass)[EACH], const Row& row, const Parameters& given, u64 edge,
                float least) {
    __shared__ u64 room[WARPS], start;
    __shared__ int found, final;
    u64 mine = 0, total;
    for (int i = 0; i < EACH; ++i) mine += mass[i];
    u64 running = sum_before(mine, total, room);
    const double goal = double(given.u) * double(total);
    if (threadIdx.x == 0) found = PIECES, final = 0;
    __syncthreads();
    for (int pass = 0; pass < 2; ++pass) {  // which piece, then the sum before it
        u64 sum = running;
        for (int i = 0; i < EACH; ++i) {
            const int piece = threadIdx.x * EACH + i;
            if (pass && piece == (found < PIECES ? found : final)) start = sum;
            sum += mass[i];
            if (pass || !mass[i]) continue;
            if (double(sum) > goal) atomicMin(&found, piece);
            atomicMax(&final, piece);
        }
        __syncthreads();
    }
    const int piece = found < PIECES ? found : final;
    __syncthreads();
    if (threadIdx.x == 0) found = V, final = -1;
    constexpr int SHARE = PIECE / THREADS;
    u64 weights[SHARE];
    mine = 0;
    for (int c = 0; c < SHARE; ++c) {
        const int i = piece * PIECE + threadIdx.x * SHARE + c;
        const float x = i < V ? logits.at(i) : -INFINITE;
        weights[c] = 0;
        if (x > -INFINITE && rank_of(x, i) >= edge) {
            const float w = weight(x - row.top, given.t, given.inverse);
            if (w >= least) weights[c] = fixed(w);
        }
        mine += weights[c];
    }
    running = sum_before(mine, total, room) + start;
    for (int c = 0; c < SHARE; ++c) {
        running += weights[c];
        if (!weights[c]) continue;
        const int i = piece * PIECE + threadIdx.x * SHARE + c;
        if (double(running) > goal) atomicMin(&found, i);
        atomicMax(&final, i);
    }
    __syncthreads();
    return found < V ? found : final >= 0 ? final : row.at;
}

// ---- Scan ----

#ifdef __CUDACC_RTC__
// Until the kernel before has ended, where this one was launched ahead of its end.
DEVICE void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS)
    scan(const void* all_logits, int kind, const float* temperature, const int* top_k, const float* top_p, const float* min_p,
         const float* uniform, Row* rows, Piece* pieces, int* tokens, int* tokens_host) {
    wait_for_previous();
    Row& row = rows[blockIdx.y];
    const Logits logits(all_logits, kind);
    pieces += u64(blockIdx.y) * PIECES;
    const Parameters given = parameters_of(temperature, top_k, top_p, min_p, uniform);
    const bool cuts = given.t != 0.0f && (given.by_k || given.by_p || given.least > 0.0f);
    const bool draws = given.t != 0.0f && !cuts;
    const float sharpness = LOG2_E * given.inverse;
    for (int piece = blockIdx.x * WARPS + threadIdx.x / 32; piece < PIECES; piece += gridDim.x * WARPS) {
        float x[32];
        logits.load_piece(x, piece);
        float top = -INFINITE, low = INFINITE, sum = 0.0f;
        int at = V;
        bool broken = false;
#pragma unroll
        for (int j = 0; j < 32; ++j) {
            broken |= !(x[j] < INFINITE);
            top = fmaxf(top, x[j]);
            if (x[j] > -INFINITE) low = fminf(low, x[j]);
        }
#pragma unroll
        for (int step = 16; step; step /= 2) {
            top = fmaxf(top, __shfl_xor_sync(ALL, top, step));
            low = fminf(low, __shfl_xor_sync(ALL, low, step));
        }
#pragma unroll
        for (int j = 31; j >= 0; --j)
            if (x[j] == top) at = place(piece, j);
#pragma unroll
        for (int step = 16; step; step /= 2) at = min(at, __shfl_xor_sync(ALL, at, step));
        if (draws && top > -INFINITE) {
#pragma unroll
            for (int j = 0; j < 32; ++j) sum += exp2_fast((x[j] - top) * sharpness);
            sum = sum_of_warp(sum);
        }
        broken = __any_sync(ALL, broken);
        if (threadIdx.x % 32 == 0) {
            pieces[piece].top = broken ? INFINITE : top;
            pieces[piece].low = low;
            pieces[piece].sum = sum;
            pieces[piece].at = at;
        }
    }
    if (!is_last(row)) return;

    __shared__ float tops[WARPS], lows[WARPS];
    __shared__ int at;
    Piece mine[EACH];
    float top = -INFINITE, low = INFINITE;
    for (int i = 0; i < EACH; ++i) {
        const int piece = threadIdx.x * EACH + i;
        mine[i].top = -INFINITE;
        mine[i].sum = 0.0f;
        if (piece >= PIECES) continue;
        mine[i].top = fresh(pieces[piece].top);
        mine[i].sum = fresh(pieces[piece].sum);
        mine[i].at = fresh(pieces[piece].at);
        top = fmaxf(top, mine[i].top);
        low = fminf(low, fresh(pieces[piece].low));
    }
    for (int step = 16; step; step /= 2) {
        top = fmaxf(top, __shfl_xor_sync(ALL, top, step));
        low = fminf(low, __shfl_xor_sync(ALL, low, step));
    }
    if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = top, lows[threadIdx.x / 32] = low;
    if (threadIdx.x == 0) at = V;
    __syncthreads();
    for (int i = 0; i < WARPS; ++i) top = fmaxf(top, tops[i]), low = fminf(low, lows[i]);
    for (int i = 0; i < EACH; ++i)
        if (mine[i].top == top && top > -INFINITE) atomicMin(&at, mine[i].at);
    __syncthreads();
    const bool none = top == INFINITE || top == -INFINITE;
    Row result = {};
    result.top = top;
    result.at = at;
    if (none || given.t == 0.0f) {
        give(none ? top > 0.0f ? -1 : -2 : at, tokens, tokens_host);
    } else if (draws) {
        u64 mass[EACH];
        for (int i = 0; i < EACH; ++i)
            mass[i] = mine[i].sum > 0.0f ? fixed(mine[i].sum * exp2_fast((mine[i].top - top) * sharpness)) : 0;
        give(draw(logits, mass, result, given, 0, 0.0f), tokens, tokens_host);
    } else {
        const float range = fminf(REACH * given.t, top - low);
        result.scale = range > 0.0f ? fminf((BINS - 1) / range, 1e38f) : 0.0f;
        result.state = given.by_k || given.by_p ? 2 : 1;
        result.first = result.last = result.kth = BINS;  // min_p alone: all are above
    }
    if (threadIdx.x == 0) row = result;
}

// ---- Histogram ----

extern "C" __global__ void __launch_bounds__(THREADS)
    histogram(const void* all_logits, int kind, const float* temperature, const int* top_k, const float* top_p, const float* min_p,
              const float* uniform, Row* rows, Piece* pieces, u32* bins) {
    __shared__ u32 counts[BINS];
    Row& row = rows[blockIdx.y];
    if (row.state != 2) return;
    const Logits logits(all_logits, kind);
    pieces += u64(blockIdx.y) * PIECES;
    bins += u64(blockIdx.y) * BINS;
    const Parameters given = parameters_of(temperature, top_k, top_p, min_p, uniform);
    const float top = row.top, scale = row.scale, sharpness = LOG2_E * given.inverse;
    for (int b = threadIdx.x; b < BINS; b += THREADS) counts[b] = 0;
    __syncthreads();
    for (int piece = blockIdx.x * WARPS + threadIdx.x / 32; piece < PIECES; piece += gridDim.x * WARPS) {
        float x[32], sum = 0.0f;
        logits.load_piece(x, piece);
#pragma unroll
        for (int j = 0; j < 32; ++j) {
            sum += exp2_fast((x[j] - top) * sharpness);
            const int b = bin_of(top - x[j], scale);
            if (b < BINS - 1) atomicAdd(&counts[b], 1u);  // the last has all the rest, -inf too
        }
        sum = sum_of_warp(sum);
        if (threadIdx.x % 32 == 0) pieces[piece].sum = sum;
    }
    __syncthreads();
    for (int b = threadIdx.x; b < BINS; b += THREADS)
        if (counts[b]) atomicAdd(&bins[b], counts[b]);
    if (!is_last(row)) return;

    // Bounds of the sum up to each bin, by its most and its least weight.
    constexpr int SHARE = BINS / THREADS;
    __shared__ float room[WARPS];
    __shared__ u32 count_room[WARPS];
    __shared__ int first, last, kth, ahead, upto_last, before_kth;
    __shared__ float least_whole, most_whole;
    float whole = 0.0f, most = 0.0f, fewest = 0.0f;
    for (int i = 0; i < EACH; ++i) {
        const int piece = threadIdx.x * EACH + i;
        if (piece < PIECES) whole += fresh(pieces[piece].sum);
    }
    const float width = scale > 0.0f ? 1.0f / scale : 0.0f;
    u32 many[SHARE], n = 0;
    float high[SHARE], lower[SHARE];
    for (int i = 0; i < SHARE; ++i) {
        const int b = threadIdx.x * SHARE + i;
        many[i] = fresh(bins[b]);
        bins[b] = 0;
        high[i] = exp2_fast(-fmaxf(b - 0.5f, 0.0f) * width * sharpness);
        lower[i] = exp2_fast(-(b + 0.5f) * width * sharpness);
        n += many[i];
        most += many[i] * high[i];
        fewest += many[i] * lower[i];
    }
    float all, all_most, all_fewest;
    u32 all_n;
    sum_before(whole, all, room);
    const float most_before = sum_before(most, all_most, room), fewest_before = sum_before(fewest, all_fewest, room);
    const u32 n_before = sum_before(n, all_n, count_room);
    const float margin = MARGIN * all, tail = (V - all_n) * exp2_fast(-(BINS - 1.5f) * width * sharpness);
    if (threadIdx.x == 0) {
        first = last = BINS - 1;
        kth = given.by_k ? BINS - 1 : BINS;
        least_whole = given.by_k ? all_fewest : all;
        most_whole = given.by_k ? fminf(all_most + tail, all) : all;
    }
    __syncthreads();
    if (given.by_k && n_before < given.k && given.k <= n_before + n) {
        u32 sum = n_before;
        float more = most_before, less = fewest_before;
        for (int i = 0; i < SHARE && sum < given.k; ++i) {
            const u32 here = min(many[i], given.k - sum);
            more += here * high[i];
            less += here * lower[i];
            sum += many[i];
            kth = threadIdx.x * SHARE + i;
        }
        least_whole = less;
        most_whole = more;
    }
    __syncthreads();
    if (given.by_p) {
        float more = most_before, less = fewest_before;
        for (int i = 0; i < SHARE; ++i) {
            const int b = threadIdx.x * SHARE + i;
            more += many[i] * high[i];
            less += many[i] * lower[i];
            float upper = more, under = less;
            if (!given.by_k) {  // the whole is known, so what lies below bounds it, too
                upper = fminf(upper, all - (all_fewest - less));
                under = fmaxf(under, all - (all_most - more) - tail);
            }
            if (upper + margin >= given.p * (least_whole - margin)) atomicMin(&first, b);
            if (under - margin >= given.p * (most_whole + margin)) atomicMin(&last, b);
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        last = min(last, kth);
        first = given.by_p ? min(first, last) : last;
    }
    __syncthreads();
    u32 sum = n_before;
    for (int i = 0; i < SHARE; ++i) {
        const int b = threadIdx.x * SHARE + i;
        if (b == first) ahead = sum;
        if (b == kth) before_kth = sum;
        sum += many[i];
        if (b == last) upto_last = sum;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        row.first = first;
        row.last = last;
        row.kth = kth;
        row.wanted = 0x7fffffff;
        if (given.by_k) row.wanted = given.k - ahead - (last < kth ? before_kth - upto_last : 0);
    }
}

// ---- Choose ----

extern "C" __global__ void __launch_bounds__(THREADS)
    choose(const void* all_logits, int kind, const float* temperature, const int* top_k, const float* top_p, const float* min_p,
           const float* uniform, Row* rows, Piece* pieces, u64* lists, int* tokens, int* tokens_host) {
    Row& row = rows[blockIdx.y];
    if (row.state == 0) return;
    const Logits logits(all_logits, kind);
    pieces += u64(blockIdx.y) * PIECES;
    lists += u64(blockIdx.y) * ROOM;
    const Parameters given = parameters_of(temperature, top_k, top_p, min_p, uniform);
    const float top = row.top, scale = row.scale, t = given.t;
    const int first = row.first, last = row.last, kth = row.kth, lane = threadIdx.x % 32;
    const float far = t * (FRACTION + 2) / LOG2_E;  // weights there are below 2^-FRACTION
    u64 above = 0, between = 0;
    for (int piece = blockIdx.x * WARPS + threadIdx.x / 32; piece < PIECES; piece += gridDim.x * WARPS) {
        float x[32];
        logits.load_piece(x, piece);
        u64 mass = 0;
        u32 listed = 0;
#pragma unroll
        for (int j = 0; j < 32; ++j) {
            const float distance = top - x[j];
            const int b = bin_of(distance, scale);
            if (distance < INFINITE && (u32(b - first) <= u32(last - first) || b == kth)) {
                listed |= 1u << j;
            } else if (b < kth && distance < far) {
                const float w = weight(-distance, t, given.inverse);
                if (b < first) {
                    above += fixed(w);
                    if (w >= given.least) mass += fixed(w);
                } else {
                    between += fixed(w);
                }
            }
        }
        if (__any_sync(ALL, listed != 0)) {
            int count = __popc(listed), before = count;
            for (int step = 1; step < 32; step *= 2) {
                const int other = __shfl_up_sync(ALL, before, step);
                if (lane >= step) before += other;
            }
            int start = 0;
            if (lane == 31) start = atomicAdd(&row.listed, before);
            before += __shfl_sync(ALL, start, 31) - count;
#pragma unroll
            for (int j = 0; j < 32; ++j)
                if (listed >> j & 1 && before < ROOM) lists[before++] = rank_of(x[j], place(piece, j));
        }
        mass = sum_of_warp(mass);
        if (lane == 0) pieces[piece].mass = mass;
    }
    above = sum_of_warp(above);
    between = sum_of_warp(between);
    if (lane == 0 && above) atomicAdd(&row.above, above);
    if (lane == 0 && between) atomicAdd(&row.between, between);
    if (!is_last(row)) return;

    __shared__ u64 list[ROOM], masses[PIECES], room[WARPS];
    const Row all = row;  // no block writes to it any more
    const Undecided some = {list, logits, &row, fresh(row.listed)};
    const u64 upper = fresh(row.above), middle = fresh(row.between);
    if (some.n <= ROOM)
        for (int i = threadIdx.x; i < some.n; i += THREADS) list[i] = fresh(lists[i]);
    for (int i = threadIdx.x; i < PIECES; i += THREADS) masses[i] = fresh(pieces[i].mass);
    __syncthreads();
    u64 edge = 0;
    if (some.n > 0) {
        if (given.by_k) edge = cut(some, 0, all.wanted, [](u64) { return u64(1); });
        const auto weigh = [&](u64 rank) { return fixed(weight(logit_of(rank) - top, t, given.inverse)); };
        if (given.by_p) {
            u64 mine = 0, total;
            some.each([&](u64 rank) {
                if (rank >= edge) mine += weigh(rank);
            });
            sum_before(mine, total, room);
            const double goal = double(given.p) * double(total + upper + middle);
            u64 reached = u64(goal);
            reached += double(reached) < goal;
            edge = cut(some, edge, reached > upper ? reached - upper : 0, weigh);
        }
        some.each([&](u64 rank) {
            const float w = weight(logit_of(rank) - top, t, given.inverse);
            if (rank >= edge && w >= given.least) atomicAdd(&masses[index_of(rank) / PIECE], fixed(w));
        });
        __syncthreads();
    }
    u64 mass[EACH];
    for (int i = 0; i < EACH; ++i) {
        const int piece = threadIdx.x * EACH + i;
        mass[i] = piece < PIECES ? masses[piece] : 0;
    }
    give(draw(logits, mass, all, given, edge, given.least), tokens, tokens_host);
}
