// Results of packed.cu, after whose layout of shared memory this is included: sums of splits are added up, then those of
// a cluster's blocks.
#pragma once

// Sums lie as the tensor cores' results do, 16 bytes of each lane of a tile: of lane 4g + q tokens 2q and 2q + 1 of row g,
// then of row g + 8. Of one token lanes of q = 0 have results.
constexpr int LANES = TOKENS == 1 ? 8 : TILES * 32, EACH_TOKEN = TOKENS == 1 ? 2 : 1;
DEVICE int lane_of(int i) { return TOKENS == 1 ? i % 8 * 4 : i % (TILES * 32); }
DEVICE int row_of(int lane, int element) { return lane % 32 / 4 + element / 2 * 8; }
DEVICE int token_of(int lane, int element) { return lane / 32 * 8 + lane % 4 * 2 + element % 2; }

DEVICE void add_4(float (&y)[4], u32 at) {
    const uint4 w = get_4(at);
    y[0] += __uint_as_float(w.x), y[1] += __uint_as_float(w.y);
    y[2] += __uint_as_float(w.z), y[3] += __uint_as_float(w.w);
}

struct Results {
    const u8* weight;
    const float* bias;
    const u16* residual;
    u16* out;
    int tokens;
    float eps;

    DEVICE void load_addend(float (&addend)[4], int panel, int lane) const {
#pragma unroll
        for (int e = 0; e < 4; e += EACH_TOKEN) {
            const int m = token_of(lane, e);
            addend[e] = RESIDUAL && m < tokens ? low_half(residual[(long long)m * R_ROW + panel * 16 + row_of(lane, e)]) : 0.0f;
        }
    }

    // `y`: a lane's sums, of gate and up.
    DEVICE void finish(const Block& block, int panel, int lane, float (&y)[HALVES][4], const float (&addend)[4]) const {
        float factors[2] = {BACK, BACK};
        if (NORM)
#pragma unroll
            for (int odd = 0; odd < 3 - EACH_TOKEN; ++odd) {
                float squares = 0.0f;
#pragma unroll
                for (int rank = 0; rank < CLUSTER; ++rank)
                    squares += get(block.base + SQUARES_AT + rank * TOKEN_BYTES + token_of(lane, odd) * 4);
                factors[odd] *= rsqrtf(squares / INNER + eps);
            }
#pragma unroll
        for (int e = 0; e < 4; e += EACH_TOKEN) {
            const int m = token_of(lane, e), row = row_of(lane, e), n = panel * 16 + row;
            if (m >= tokens) continue;
#pragma unroll
            for (int h = 0; h < HALVES; ++h) {
                y[h][e] *= factors[e % 2];
                if (GROUP == 0 || BYTE_SCALES == 1)
                    y[h][e] *= __ldg((const float*)(weight + (panel + h * PANELS) * PANEL_BYTES + CODE_BYTES) + row);
                if (BIAS) y[h][e] += bias[h * RESULTS + n];
            }
            // Rounded as the product's own result would be.
            float v = GATED ? activate(rounded(y[0][e])) * rounded(y[HALVES - 1][e]) : y[0][e];
            if (RESIDUAL) v += addend[e];
            out[(long long)m * RESULTS + n] = u16(pack_bf16(v, 0.0f));
        }
    }
};

// Where the block that joins a panel's parts, its `slot`-th, has that of the cluster's block `rank`.
DEVICE u32 part_at(const Block& block, int rank, int slot, int half, int lane) {
    return block.base + PARTS_AT + (((rank * SLOTS + slot) * HALVES + half) * TILES * 32 + lane) * 16;
}

// Bytes that the blocks of a cluster send to this one.
DEVICE u32 part_bytes(const Block& block, int tokens) {
    const int slots = (block.mine - block.rank + CLUSTER - 1) / CLUSTER, lanes = 8 * ((tokens + 1) / 2);
    return CLUSTER * (slots * HALVES * lanes * 16 + (NORM ? TOKENS * 4 : 0));
}

DEVICE void finish_batches(const Block& block, const Results& results) {
    constexpr int TURNS = (EACH * LANES + 32 * FINISHERS - 1) / (32 * FINISHERS);
    const int thread = threadIdx.x - (THREADS + 32 * COPIERS);
    if (CLUSTER > 1) cluster_wait();
    for (int b = 0; b < block.batches(); ++b) {
        float addend[TURNS][4];
#pragma unroll
        for (int j = 0; j < TURNS; ++j) {
            const int i = j * 32 * FINISHERS + thread, index = b * EACH + i / LANES;
            if (CLUSTER == 1 && i < EACH * LANES && index < block.mine)
                results.load_addend(addend[j], block.panel(index), lane_of(i));
        }
        barrier_wait(block.summed(b), b / 2 & 1);
#pragma unroll
        for (int j = 0; j < TURNS; ++j) {
            const int i = j * 32 * FINISHERS + thread, local = i / LANES, index = b * EACH + local, lane = lane_of(i);
            if (i >= EACH * LANES || index >= block.mine || token_of(lane, 0) >= results.tokens) continue;
            float y[HALVES][4] = {};
#pragma unroll
            for (int h = 0; h < HALVES; ++h) {
                const u32 at = block.base + SUMS_AT + b % 2 * SUMS_BYTES + ((local * HALVES + h) * TILES * 32 + lane) * 16;
#pragma unroll
                for (int w = 0; w < SPLITS; ++w) add_4(y[h], at + w * EACH * HALVES * TILES * TILE_BYTES);
                if (CLUSTER > 1)
                    send_4(y[h], part_at(block, block.rank, index / CLUSTER, h, lane), block.parts(), index % CLUSTER);
            }
            if (CLUSTER == 1) results.finish(block, block.panel(index), lane, y, addend[j]);
        }
        barrier_arrive(block.taken(b));
    }
}

// Of the panels whose parts lie in this block's shared memory.
DEVICE void join(const Block& block, const Results& results) {
    constexpr int ITEMS = SLOTS * LANES, TURNS = (ITEMS + THREADS - 1) / THREADS;
    float addend[TURNS][4];
#pragma unroll
    for (int j = 0; j < TURNS; ++j) {
        const int i = j * THREADS + threadIdx.x, index = i / LANES * CLUSTER + block.rank;
        if (i < ITEMS && index < block.mine) results.load_addend(addend[j], block.panel(index), lane_of(i));
    }
    barrier_wait(block.parts(), 0);
#pragma unroll
    for (int j = 0; j < TURNS; ++j) {
        const int i = j * THREADS + threadIdx.x, slot = i / LANES, index = slot * CLUSTER + block.rank, lane = lane_of(i);
        if (i >= ITEMS || index >= block.mine || token_of(lane, 0) >= results.tokens) continue;
        float y[HALVES][4] = {};
#pragma unroll
        for (int h = 0; h < HALVES; ++h)
#pragma unroll
            for (int rank = 0; rank < CLUSTER; ++rank) add_4(y[h], part_at(block, rank, slot, h, lane));
        results.finish(block, block.panel(index), lane, y, addend[j]);
    }
}
