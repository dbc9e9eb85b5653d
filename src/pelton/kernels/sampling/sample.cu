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

#ifndef DEVICE
#define DEVICE __device__ __forceinline__
#endif
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int THREADS = 256, WARPS = THREADS / 32, PIECE = 1024, PIECES = (V + PIECE - 1) / PIECE;
constexpr int EACH = (PIECES + THREADS - 1) / THREADS;  // pieces that a thread of the last block looks at
constexpr int BINS = 2048, ROOM = 4096, DIGITS = 256;
constexpr int log2_of(int n) { return n > 1 ? 1 + log2_of((n + 1) / 2) : 0; }
constexpr int FRACTION = log2_of(V) > 18 ? 62 - log2_of(V) : 44;
constexpr float REACH = 24.0f;   // temperatures that the bins reach below the largest logit
constexpr float MARGIN = 5e-6f;  // of the row's sum: what float32 may lose of the bounds
constexpr float LOG2_E = 1.4426950408889634f;
constexpr u32 ALL = 0xffffffff;
#define INFINITE __int_as_float(0x7f800000)

struct Row {
    u64 above, between;  // sums of weights above bin `first`, and from behind bin `last` to before bin `kth`
    float top;
    float scale;    // bins a unit
    int at;         // the first index with the largest logit
    int state;      // what is left to do: 0 nothing, 1 choose, 2 histogram and choose
    int first, last, kth;
    int wanted;     // of the list, so many stay by top_k
    int listed;
    u32 arrived;    // blocks that are done; 0 between kernels
    int unused[2];
};
struct Piece {
    u64 mass;  // the sum of its weights that surely stay
    float top, low, sum;
    int at;
};
static_assert(sizeof(Row) == 64 && sizeof(Piece) == 24, "cuda.py has these");

struct Parameters {
    float t, p, least, u;
    int k;
    bool by_k, by_p;
};

// ---- Sums of a warp and of a block ----

template <class T>
DEVICE T sum_of_warp(T x) {
#pragma unroll
    for (int step = 16; step; step /= 2) x += __shfl_xor_sync(ALL, x, step);
    return x;
}

// The sum over the threads before this one; `total`: over all. `room`: WARPS of shared memory.
template <class T>
DEVICE T sum_before(T x, T& total, T* room) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    T running = x;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const T other = __shfl_up_sync(ALL, running, step);
        if (lane >= step) running += other;
    }
    __syncthreads();
    if (lane == 31) room[warp] = running;
    __syncthreads();
    T before = 0;
    total = 0;
    for (int i = 0; i < WARPS; ++i) {
        if (i == warp) before = total;
        total += room[i];
    }
    return before + (running - x);
}

// What other blocks have written in this kernel.
template <class T>
DEVICE T fresh(const T& x) {
    return *const_cast<const volatile T*>(&x);
}

// Whether all other blocks of the row are done; what they have written is then there.
DEVICE bool is_last(Row& row) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(&row.arrived, 1u) == gridDim.x - 1;
        if (last) row.arrived = 0;
    }
    __syncthreads();
    __threadfence();
    return last;
}

// ---- Logits and weights ----

DEVICE Parameters parameters_of(const float* temperature, const int* top_k, const float* top_p, const float* min_p,
                                const float* uniform) {
    const int n = blockIdx.y;
    Parameters x;
    x.t = temperature[n];
    if (x.t == 0.0f) return x;
    x.k = top_k[n];
    x.p = top_p[n];
    x.least = min_p[n];
    x.u = uniform[n];
    x.by_k = x.k > 0 && x.k < V;
    x.by_p = x.p < 1.0f;
    return x;
}

// A piece of a row: logit `place(piece, j)` in x[j], -inf behind the row's end.
DEVICE int place(int piece, int j) {
    const int lane = threadIdx.x % 32;
    return piece * PIECE + (V % 4 ? j * 32 + lane : j / 4 * 128 + lane * 4 + j % 4);
}

DEVICE void load_piece(float (&x)[32], const float* row, int piece) {
    if (V % 4) {
#pragma unroll
        for (int j = 0; j < 32; ++j) x[j] = place(piece, j) < V ? row[place(piece, j)] : -INFINITE;
    } else {
#pragma unroll
        for (int j = 0; j < 32; j += 4) {
            float4 four = {-INFINITE, -INFINITE, -INFINITE, -INFINITE};
            if (place(piece, j) < V) four = *reinterpret_cast<const float4*>(row + place(piece, j));
            x[j] = four.x;
            x[j + 1] = four.y;
            x[j + 2] = four.z;
            x[j + 3] = four.w;
        }
    }
}

// reference.exp32: no operation may be fused.
DEVICE float exp32(float x) {
    const float safe = fmaxf(x, -87.0f);
    const float n = rintf(__fmul_rn(safe, 1.44269504f));
    const float r = __fsub_rn(__fsub_rn(safe, __fmul_rn(n, 0.693359375f)), __fmul_rn(n, -2.12194440e-4f));
    float p = 1.9875691500e-4f;
    p = __fadd_rn(__fmul_rn(p, r), 1.3981999507e-3f);
    p = __fadd_rn(__fmul_rn(p, r), 8.3334519073e-3f);
    p = __fadd_rn(__fmul_rn(p, r), 4.1665795894e-2f);
    p = __fadd_rn(__fmul_rn(p, r), 1.6666665459e-1f);
    p = __fadd_rn(__fmul_rn(p, r), 0.5f);
    const float y = __fadd_rn(__fadd_rn(__fmul_rn(p, __fmul_rn(r, r)), r), 1.0f);
    return x < -87.0f ? 0.0f : __fmul_rn(y, __int_as_float((int(n) + 127) << 23));
}

DEVICE float weight(float x, float top, float t) { return exp32(__fdiv_rn(__fsub_rn(x, top), t)); }

DEVICE u64 fixed(float w) { return static_cast<u64>(w * float(1ull << FRACTION)); }

// Ever smaller for larger logits, and the same for equal ones.
DEVICE int bin_of(float x, float top, float scale) { return int(fminf((top - x) * scale, float(BINS - 1))); }

// In the order in which tokens stay: larger logits, then smaller indices, have larger ranks.
DEVICE u64 rank_of(float x, int i) {
    const u32 bits = __float_as_int(x + 0.0f);  // -0 is 0
    return u64(bits >> 31 ? ~bits : bits ^ 0x80000000u) << 32 | u32(~i);
}
DEVICE float logit_of(u64 rank) {
    const u32 key = rank >> 32;
    return __int_as_float(key >> 31 ? key ^ 0x80000000u : ~key);
}
DEVICE int index_of(u64 rank) { return ~u32(rank); }

// ---- The last block ----

DEVICE void give(int token, int* tokens, int* tokens_host) {
    if (threadIdx.x == 0) tokens[blockIdx.y] = tokens_host[blockIdx.y] = token;
}

// The first token at which the running sum exceeds u of the whole: `mass` of each of this thread's pieces. Of tokens
// those count whose rank is at least `edge` and whose weight is at least `least`.
DEVICE int draw(const float* logits, const u64 (&mass)[EACH], const Row& row, const Parameters& given, u64 edge,
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
        const float x = i < V ? logits[i] : -INFINITE;
        weights[c] = 0;
        if (x > -INFINITE && rank_of(x, i) >= edge) {
            const float w = weight(x, row.top, given.t);
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

extern "C" __global__ void __launch_bounds__(THREADS)
    scan(const float* logits, const float* temperature, const int* top_k, const float* top_p, const float* min_p,
         const float* uniform, Row* rows, Piece* pieces, int* tokens, int* tokens_host) {
    Row& row = rows[blockIdx.y];
    logits += u64(blockIdx.y) * V;
    pieces += u64(blockIdx.y) * PIECES;
    const Parameters given = parameters_of(temperature, top_k, top_p, min_p, uniform);
    const bool cuts = given.t != 0.0f && (given.by_k || given.by_p || given.least > 0.0f);
    const bool draws = given.t != 0.0f && !cuts;
    const float sharpness = LOG2_E / fmaxf(given.t, 1e-30f);
    for (int piece = blockIdx.x * WARPS + threadIdx.x / 32; piece < PIECES; piece += gridDim.x * WARPS) {
        float x[32];
        load_piece(x, logits, piece);
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
            for (int j = 0; j < 32; ++j) sum += exp2f((x[j] - top) * sharpness);
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
            mass[i] = mine[i].sum > 0.0f ? fixed(mine[i].sum * exp2f((mine[i].top - top) * sharpness)) : 0;
        give(draw(logits, mass, result, given, 0, 0.0f), tokens, tokens_host);
    } else {
        const float range = fminf(REACH * given.t, top - low);
        result.scale = range > 0.0f ? fminf((BINS - 1) / range, 1e38f) : 0.0f;
        result.state = given.by_k || given.by_p ? 2 : 1;
        result.first = result.kth = BINS;  // min_p alone: all are above
    }
    if (threadIdx.x == 0) row = result;
}

// ---- Histogram ----

extern "C" __global__ void __launch_bounds__(THREADS)
    histogram(const float* logits, const float* temperature, const int* top_k, const float* top_p, const float* min_p,
              const float* uniform, Row* rows, Piece* pieces, u32* bins) {
    __shared__ u32 counts[BINS];
    Row& row = rows[blockIdx.y];
    if (row.state != 2) return;
    logits += u64(blockIdx.y) * V;
    pieces += u64(blockIdx.y) * PIECES;
    bins += u64(blockIdx.y) * BINS;
    const Parameters given = parameters_of(temperature, top_k, top_p, min_p, uniform);
    const float top = row.top, scale = row.scale, sharpness = LOG2_E / fmaxf(given.t, 1e-30f);
    for (int b = threadIdx.x; b < BINS; b += THREADS) counts[b] = 0;
    __syncthreads();
    for (int piece = blockIdx.x * WARPS + threadIdx.x / 32; piece < PIECES; piece += gridDim.x * WARPS) {
        float x[32], sum = 0.0f;
        load_piece(x, logits, piece);
#pragma unroll
        for (int j = 0; j < 32; ++j) {
            if (x[j] == -INFINITE) continue;
            sum += exp2f((x[j] - top) * sharpness);
            const int b = bin_of(x[j], top, scale);
            if (b < BINS - 1) atomicAdd(&counts[b], 1u);  // the last has all the rest
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
        high[i] = exp2f(-b * width * sharpness);
        lower[i] = exp2f(-(b + 1) * width * sharpness);
        n += many[i];
        most += many[i] * high[i];
        fewest += many[i] * lower[i];
    }
    float all, all_most, all_fewest;
    u32 all_n;
    sum_before(whole, all, room);
    const float most_before = sum_before(most, all_most, room), fewest_before = sum_before(fewest, all_fewest, room);
    const u32 n_before = sum_before(n, all_n, count_room);
    const float margin = MARGIN * all, tail = (V - all_n) * exp2f(-(BINS - 1) * width * sharpness);
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

// What the histogram could not decide about: ranks in shared memory, or where they are too many, in the row.
struct Undecided {
    const u64* list;
    const float* logits;
    const Row* row;
    int n;

    template <class Visit>
    DEVICE void each(Visit visit) const {
        if (n <= ROOM) {
            for (int i = threadIdx.x; i < n; i += THREADS) visit(list[i]);
            return;
        }
        for (int i = threadIdx.x; i < V; i += THREADS) {
            const float x = logits[i];
            if (x == -INFINITE) continue;
            const int b = bin_of(x, row->top, row->scale);
            if ((b >= row->first && b <= row->last) || b == row->kth) visit(rank_of(x, i));
        }
    }
};

// The largest rank so that `goal` of those at least as large are there, of those from `least` on: by their number,
// or with `weigh` by their weights; the smallest where there is not so much. At least one stays.
template <class Weigh>
DEVICE u64 cut(const Undecided& some, u64 least, u64 goal, Weigh weigh) {
    __shared__ u32 counts[DIGITS], lows[DIGITS], highs[DIGITS];
    __shared__ u32 count_room[WARPS];
    __shared__ u64 room[WARPS], chosen, above;
    __shared__ u32 alone, ones[2], zeros[2];
    if (threadIdx.x < 2) ones[threadIdx.x] = zeros[threadIdx.x] = 0;
    __syncthreads();
    u64 any_one = 0, any_zero = 0;
    some.each([&](u64 rank) {
        if (rank < least) return;
        any_one |= rank;
        any_zero |= ~rank;
    });
    for (int half = 0; half < 2; ++half) {
        atomicOr(&ones[half], u32(any_one >> 32 * half));
        atomicOr(&zeros[half], u32(any_zero >> 32 * half));
    }
    __syncthreads();
    // The bits from which on they differ, and what they have in common before.
    const u32 high = ones[1] & zeros[1], low = ones[0] & zeros[0];
    int bits = high ? 64 - __clz(high) : low ? 32 - __clz(low) : 0;
    u64 prefix = bits < 64 ? (u64(ones[1]) << 32 | ones[0]) >> bits : 0;
    while (bits > 0) {
        const int rest = max(0, bits - 8);
        counts[threadIdx.x] = lows[threadIdx.x] = highs[threadIdx.x] = 0;
        __syncthreads();
        some.each([&](u64 rank) {
            if (rank < least || (bits < 64 ? rank >> bits : 0) != prefix) return;
            const int digit = int(rank >> rest) & ((1 << (bits - rest)) - 1);
            const u64 w = weigh(rank);
            atomicAdd(&counts[digit], 1u);
            const u32 old = atomicAdd(&lows[digit], u32(w));
            const u32 more = u32(w >> 32) + (old + u32(w) < old);
            if (more) atomicAdd(&highs[digit], more);
        });
        __syncthreads();
        // Thread d has the digit d from the largest.
        const int digit = DIGITS - 1 - threadIdx.x;
        const u32 n = counts[digit];
        const u64 mine = u64(highs[digit]) << 32 | lows[digit];
        u64 total;
        const u64 before = sum_before(mine, total, room);
        u32 all;
        const u32 n_before = sum_before(n, all, count_room);
        const u64 wanted = goal ? goal : 1;
        // The digit at which the sum gets there; else the last one that there is.
        if (n && before < wanted && (before + mine >= wanted || n_before + n == all)) {
            chosen = digit;
            above = before;
            alone = n == 1;
        }
        __syncthreads();
        prefix = prefix << (bits - rest) | chosen;
        goal = goal > above ? goal - above : 0;
        bits = rest;
        if (alone) break;
        __syncthreads();
    }
    __syncthreads();
    if (threadIdx.x == 0) chosen = prefix;
    __syncthreads();
    if (bits > 0)  // there is but one such
        some.each([&](u64 rank) {
            if (rank >= least && rank >> bits == prefix) chosen = rank;
        });
    __syncthreads();
    const u64 edge = chosen;
    __syncthreads();
    return edge > least ? edge : least;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    choose(const float* logits, const float* temperature, const int* top_k, const float* top_p, const float* min_p,
           const float* uniform, Row* rows, Piece* pieces, u64* lists, int* tokens, int* tokens_host) {
    Row& row = rows[blockIdx.y];
    if (row.state == 0) return;
    logits += u64(blockIdx.y) * V;
    pieces += u64(blockIdx.y) * PIECES;
    lists += u64(blockIdx.y) * ROOM;
    const Parameters given = parameters_of(temperature, top_k, top_p, min_p, uniform);
    const float top = row.top, scale = row.scale, t = given.t;
    const int first = row.first, last = row.last, kth = row.kth, lane = threadIdx.x % 32;
    const float far = t * (FRACTION + 2) / LOG2_E;  // weights there are below 2^-FRACTION
    u64 above = 0, between = 0;
    for (int piece = blockIdx.x * WARPS + threadIdx.x / 32; piece < PIECES; piece += gridDim.x * WARPS) {
        float x[32];
        load_piece(x, logits, piece);
        u64 mass = 0;
        u32 listed = 0;
#pragma unroll
        for (int j = 0; j < 32; ++j) {
            if (x[j] == -INFINITE) continue;
            const int b = bin_of(x[j], top, scale);
            if ((b >= first && b <= last) || b == kth) {
                listed |= 1u << j;
            } else if (b < kth && top - x[j] < far) {
                const float w = weight(x[j], top, t);
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
    if (some.n <= ROOM)
        for (int i = threadIdx.x; i < some.n; i += THREADS) list[i] = fresh(lists[i]);
    for (int i = threadIdx.x; i < PIECES; i += THREADS) masses[i] = fresh(pieces[i].mass);
    __syncthreads();
    u64 edge = 0;
    if (some.n > 0) {
        if (given.by_k) edge = cut(some, 0, all.wanted, [](u64) { return u64(1); });
        const auto weigh = [&](u64 rank) { return fixed(weight(logit_of(rank), top, t)); };
        if (given.by_p) {
            u64 mine = 0, total;
            some.each([&](u64 rank) {
                if (rank >= edge) mine += weigh(rank);
            });
            sum_before(mine, total, room);
            const u64 upper = fresh(row.above);
            const double goal = double(given.p) * double(total + upper + fresh(row.between));
            u64 reached = u64(goal);
            reached += double(reached) < goal;
            edge = cut(some, edge, reached > upper ? reached - upper : 0, weigh);
        }
        some.each([&](u64 rank) {
            const float w = weight(logit_of(rank), top, t);
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
