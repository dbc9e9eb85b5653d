// Where a block's x, codes and sums lie, and what copies them there: part of hopper_wide.cu.
#pragma once

struct Shared {
    u32 base;
    int lane;
    DEVICE u32 full(u32 stage) const { return base + BARRIERS_AT + 16 * stage; }
    DEVICE u32 empty(u32 stage) const { return full(stage) + 8; }
    DEVICE u32 x(u32 stage) const { return base + stage * X_BYTES; }
    DEVICE u32 staged(u32 group) const { return base + (STAGES + group) * X_BYTES; }
    DEVICE u32 slots(u32 warp) const { return base + SLOTS_AT + warp * OF_WARP; }

    DEVICE u32 nothing() const { return empty(STAGES); }  // where two stages would follow, for arrivals that count for none
    DEVICE u32 sent(int row_group) const { return full(STAGES + row_group); }  // by the cluster's other blocks

    // Until x is there. What lay there before may be another split's, and not even have come yet: a barrier alone
    // does not tell the turn before last from this one.
    DEVICE void wait(u32 stage, u32 parity) const {
        if (SPLITS > 1) barrier_wait(empty(stage), parity ^ 1);
        barrier_wait(full(stage), parity);
    }

    // By a warp.
    DEVICE void arrive(u32 barrier) const {
        if (lane == 0) barrier_arrive(barrier);
    }
    DEVICE void release(u32 stage) const { arrive(empty(stage)); }
};

// The place in a ring: of a unit, two stages.
struct Ring {
    u32 stage = 0, parity = 0;
    template <int UNITS = 1>
    DEVICE void next() {
        if ((stage += 2 * UNITS) >= STAGES) stage -= STAGES, parity ^= 1;
    }
};

// The tokens of half a strip of this cluster.
DEVICE int first_of_half() { return blockIdx.x / CLUSTER % 2 * (TOKENS / 2); }

// What a warp group multiplies in a round: panels of results, none where there are no more; `half`: of half of the
// tokens.
struct Strip {
    int panel, panels;
    bool half;
    DEVICE Strip(int round, int group) {
        const int cluster = blockIdx.x / CLUSTER, index = round * ROUND + group * STRIP;  // of the cluster's panels
        half = HALF_STRIP && index == EACH;
        if (!HALF_STRIP) panel = cluster * EACH + index;
        else panel = cluster / 2 * (2 * EACH + STRIP) + (half ? 2 * EACH : cluster % 2 * EACH + index);
        panels = min(min(STRIP, half ? STRIP : EACH - index), PANELS - panel);
    }
    DEVICE int first_token() const { return blockIdx.y * TOKENS + (half ? first_of_half() : 0); }
    DEVICE int tokens() const { return half ? TOKENS / 2 : TOKENS; }
    // The panel of the weight that a warp of the group has; the last more than once.
    DEVICE int of_warp(int warp) const {
        return panel + min(warp % STRIP, panels - 1) + (GATED ? warp / 2 * PANELS : 0);
    }
};

// By one thread: units first to last of x, for every round.
DEVICE void copy_x(const Shared& shared, const TensorMap* x, int first, int last) {
    Ring ring;
    for (int round = 0; round < ROUNDS; ++round) {
        for (int unit = first; unit < last; ++unit) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const u32 stage = ring.stage + i;
                if (round * (last - first) + unit - first >= STAGES / 2) barrier_wait(shared.empty(stage), ring.parity ^ 1);
                barrier_expect(shared.full(stage), X_BYTES);
                copy_2d(shared.x(stage), x, shared.full(stage), unit * UNIT + 64 * i, blockIdx.y * TOKENS);
            }
            ring.next();
        }
    }
}

// What a warp copies of its panel: units in turns, then those of the next round. A slot is filled anew in the turn after
// the one in which it was read.
struct Ahead {
    const u8* weight;
    u32 slots;  // of the warp
    int lane, warp, first, count, round = -1, left = 0;  // `warp`: of the round's; `left`: units of this round
    u32 slot = 0;
    const u8 *codes, *area;  // of this lane, where they are in the weight

    DEVICE void begin_round() {
        for (++round; round < ROUNDS; ++round) {
            const Strip strip(round, warp / 4);
            if (strip.panels <= 0) continue;
            const u8* panel = weight + u32(strip.of_warp(warp % 4)) * u32(PANEL_BYTES) + 16 * lane;
            codes = panel + first * UNIT_CODES;
            area = panel + AREAS_AT + (GROUP > UNIT ? 0 : first * UNIT_AREA);
            left = count;
            return;
        }
    }
    DEVICE void copy() {
        if (left > 0) {
            const u32 to = slots + slot * SLOT + 16 * lane;
#pragma unroll
            for (u32 at = 0; at < UNIT_CODES; at += 512) {
                if (at + 512 <= UNIT_CODES) copy_chunk(to + at, codes + at);
                else copy_chunk_if(at + 16 * lane < UNIT_CODES, to + at, codes + at);
            }
            const u32 area_to = ONE_AREA ? slots + DEPTH * SLOT + 16 * lane : to + UNIT_CODES;
            if (SCALES > 0) copy_chunk_if(lane < UNIT_AREA / 16, area_to, area);
            codes += SPLITS * UNIT_CODES;
            area += SPLITS * UNIT_AREA;
            if (--left == 0) begin_round();
        }
        copies_commit();
        if (++slot == DEPTH) slot = 0;
    }
};
