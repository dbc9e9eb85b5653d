// What two blocks that share a tile's columns (SPLIT 2) do with their sums, in hopper_products.cu and hopper_blocks.cu,
// whose constants these are: of each pair of sixteens by sixteen of a warp one is this block's, the other is sent.
#pragma once
#include "hopper_cluster.cuh"
#include "hopper_finish.cuh"

// Of a tile's sums, sixteens by sixteen of each warp; those that a block has in the end; what it is sent lies in fours of
// all threads.
constexpr int ALL = M_TILES * SIXTEENS, OWN = (ALL + SPLIT - 1) / SPLIT;
constexpr u32 FOUR = THREADS * 16, SENT_SPACE = SPLIT > 1 ? 2 * OWN * FOUR : 0;
static_assert(SPLIT <= 2 && (SPLIT == 1 || SHARE == 1), "clusters of two");
static_assert(SPLIT == 1 || M_TILES <= 2, "scales are chosen between two");

// How many bytes the block `split` is sent.
DEVICE u32 sent_bytes(int split) { return 2 * FOUR * ((ALL - split + 1) / 2); }

struct Halves {
    u32 residuals[SPLIT > 1 ? OWN : 1][EIGHTS_OF_SIXTEEN][2];

    // The residuals of this block's: asked for before they are needed.
    DEVICE void load(const Finish& finish, int split) {
#pragma unroll
        for (int i = 0; i < (SPLIT > 1 ? OWN : 0); ++i) {
            const int g = min(i * SPLIT + split, ALL - 1);
            finish.load(residuals[i], g / SIXTEENS, g % SIXTEENS);
        }
    }

    // By each thread, of its sums `value(m, i)`. `place`: what it is sent, in fours; `sent`: the barrier of that.
    template <class Value>
    DEVICE void meet(const Finish& finish, int split, u32 place, u32 sent, Value value) const {
        auto pair = [&](int i, int split, int j) {
            const int g = min(2 * i + split, ALL - 1);
            return value(g / SIXTEENS, 8 * (g % SIXTEENS) + j);
        };
        const int other = split ^ 1;
        const u32 there = of_block(place, other), barrier = of_block(sent, other);
        cluster_wait();  // the other's barrier is there
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            float v[8];
#pragma unroll
            for (int j = 0; j < 8; ++j) v[j] = split ? pair(i, 0, j) : pair(i, 1, j);
            if (ALL % 2 && i == OWN - 1 && other) continue;
            send_4(v[0], v[1], v[2], v[3], there + 2 * i * FOUR, barrier);
            send_4(v[4], v[5], v[6], v[7], there + (2 * i + 1) * FOUR, barrier);
        }
        barrier_wait(sent, 0);
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            const int g = i * SPLIT + split, m = g / SIXTEENS;
            if (g >= ALL) break;
            const u32 from = place + 2 * i * FOUR;
            const uint4 low = get_4(from), high = get_4(from + FOUR);
            const u32 others[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
            float v[8];
#pragma unroll
            for (int j = 0; j < 8; ++j) v[j] = __uint_as_float(others[j]) + (split ? pair(i, 1, j) : pair(i, 0, j));
            const float(&rows)[2] = finish.x_scales[M_TILES > 1 && m > 0 ? M_TILES - 1 : 0];
            u32 results[EIGHTS_OF_SIXTEEN][2];
            finish.round(results, v, residuals[SPLIT > 1 ? i : 0], g % SIXTEENS, rows[0], rows[1]);
            finish.store(results, m, g % SIXTEENS);
        }
    }
};
