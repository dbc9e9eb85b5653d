// Where a list of tokens is cut by top_k or top_p: by digits of (logit, index), 8 bits at a time.
#pragma once
#include "rows.cuh"

// What the histogram could not decide about: ranks in shared memory, or where they are too many, in the row.
struct Undecided {
    const u64* list;
    Logits logits;
    const Row* row;
    int n;

    template <class Visit>
    DEVICE void each(Visit visit) const {
        if (n <= ROOM) {
            for (int i = threadIdx.x; i < n; i += THREADS) visit(list[i]);
            return;
        }
        for (int i = threadIdx.x; i < V; i += THREADS) {
            const float x = logits.at(i);
            if (x == -INFINITE) continue;
            const int b = bin_of(row->top - x, row->scale);
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
        const u32 one = __reduce_or_sync(ALL, u32(any_one >> 32 * half));
        const u32 zero = __reduce_or_sync(ALL, u32(any_zero >> 32 * half));
        if (threadIdx.x % 32) continue;
        atomicOr(&ones[half], one);
        atomicOr(&zeros[half], zero);
    }
    __syncthreads();
    // The bits from which on they differ, and what they have in common before.
    const u32 high = ones[1] & zeros[1], low = ones[0] & zeros[0];
    int bits = high ? 64 - __clz(high) : low ? 32 - __clz(low) : 0;
    u64 prefix = (u64(ones[1]) << 32 | ones[0]) >> bits;
    while (bits > 0) {
        const int rest = max(0, bits - 8);
        counts[threadIdx.x] = lows[threadIdx.x] = highs[threadIdx.x] = 0;
        __syncthreads();
        some.each([&](u64 rank) {
            if (rank < least || rank >> bits != prefix) return;
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
