// A unit of packed weights, 128 columns of a warp's 16 rows, decoded and multiplied: part of hopper_wide.cu.
#pragma once

// Of this thread: the sums, with SUMS those of a group of columns, not scaled yet, and their scales.
struct Sums {
    float whole[VALUES], part[VALUES], scale[2];

    DEVICE void add_part() {
#pragma unroll
        for (int i = 0; i < VALUES && SUMS; ++i) whole[i] += part[i] * scale[i / 2 % 2];
    }
};

// The sums of all tokens, or of half of them.
template <int HALVED>
DEVICE float (&sums_of(float (&d)[VALUES]))[VALUES >> HALVED] {
    return reinterpret_cast<float(&)[VALUES >> HALVED]>(d);
}

// Whether codes become float32, which one operation scales.
constexpr bool FLOATS = CODE == 3 && SCALES > 0 && !SUMS;

// Of a group with an offset: the nearest integer zero point, as `less_of`, and what it leaves of the offset, at most half
// a scale where zero points are as large as codes; two bfloat16.
DEVICE u32 less_and_rest(const Scale& s) {
    const float zero = fminf(fmaxf(rintf(__fdividef(-s.offset, s.scale)), -127.0f), 128.0f);
    return pack_bf16(-128.0f - zero, fmaf(zero, s.scale, s.offset));
}

// Of a unit, loaded ahead: the first codes; of row lane % 16 the scale (two bfloat16 unless SUMS or FLOATS) and the zero
// point, or what stands for an offset. TABLED, both are read from shared memory, a bfloat16 twice, by the lanes that need
// them, which is less work than a shuffle and a permutation for each.
struct Loaded {
    u32 area, table;  // where they are: ONE_AREA's, TABLED's
    uint4 codes;
    u32 upper[2];
    u32 scales[WORDS], lesser[WORDS];
    Nf4 nf4;

    DEVICE void load(u32 slot, int lane) {
        const u32 areas = ONE_AREA ? area : slot + UNIT_CODES;
        copies_wait<DEPTH - 2>();
        __syncwarp();
#pragma unroll
        for (int w = 0; w < WORDS && SCALES > 0; ++w) {
            const int group = 2 * w + (SCALES > 1 ? lane / 16 : 0), row = lane % 16;
            const Scale s = scale_at(areas, group, row);
            const float scale = SCALED * s.scale, top = rounded(scale);
            const u32 zero = ZERO ? get_byte(areas + group * AREA + 16 * SCALE_BYTES + row) : 0;
            scales[w] = SUMS || FLOATS ? __float_as_uint(scale) : pack_bf16(top, scale - top);
            lesser[w] = FLOATS ? __float_as_uint(plus_of(zero, scale)) : OFFSET ? less_and_rest(s) : less_of(zero);
            if (TABLED && FLOATS) put_2(entry(group, row), scales[w], lesser[w]);
            else if (TABLED) put_2(entry(group, row), __byte_perm(scales[w], 0, 0x1010), __byte_perm(scales[w], 0, 0x3232));
        }
        if (TABLED || ONE_AREA) __syncwarp();  // all have put theirs; have read what is copied over
        codes = get_4(slot + lane * 16);
        load_upper(upper, slot, lane);
    }
    // In the table, of a group and a row; the next group is 8 bytes on, of the first of two.
    DEVICE u32 entry(int group, int row) const { return table + group / 2 * 256 + row * 16 + group % 2 * 8; }
};
// Whether a unit is loaded in the one before: where that takes no registers that are needed.
constexpr bool EARLY = GROUPS < 4;

// What is left of a unit's x, when its products have ended.
DEVICE void release_last(const Shared& shared, u32 stage) {
    if (8 / STEPS == 2) shared.release(stage);
    shared.release(stage + 1);
}

// One unit, from `slot` on. `before`: the first stage of the unit before; `next`: the slot of the next. HALVED: of half
// of the tokens.
template <int HALVED>
DEVICE void multiply(const Shared& shared, const Ring& ring, u32 before, Sums& sums, Loaded& loaded, u32 slot, u32 next,
                     Ahead& ahead) {
    const int lane = shared.lane;
    constexpr int TURNS = 8 / STEPS;
    const u32 x = u32(matrix(shared.x(ring.stage) + (HALVED ? first_of_half() * ROW_BYTES : 0), 8 * ROW_BYTES, 16));
    if (!EARLY) {
        loaded.load(slot, lane);
        ahead.copy();
    }
    uint4 codes = loaded.codes;
    u32 upper[2] = {loaded.upper[0], loaded.upper[1]};
    u32 less[2] = {less_of(MIDDLE), less_of(MIDDLE)}, rest[2] = {MINUS_ZERO, MINUS_ZERO};
    u32 high[2], low[2], a[2][STEPS][4], both[2][4][2];
    float next_scale[2], plus[2];
    uint4 two[2];  // groups' entries
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
        // The registers of two turns ago have been read, and so has their x.
        product_wait<1>();
        pin(codes);  // nothing is decoded before
        if (turn == TURNS / 2 + 1) shared.release(ring.stage);
        if (!SUMS && TURNS == 2 && turn == 0) shared.release(before);
        if (!SUMS && turn == 1) shared.release(before + 1);
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            const int step = turn * STEPS + s, load = EIGHT ? step / 2 : step / 4;
            constexpr int SPAN = GROUP > 0 && GROUP < UNIT ? GROUP / 16 : 8;  // steps of a scale
            if (TABLED && step % SPAN == 0) {
                const int group = step / SPAN;
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    if (group % 2 == 0) two[r] = get_4(loaded.entry(group, lane / 4 + 8 * r));
                    high[r] = group % 2 ? two[r].z : two[r].x;
                    low[r] = group % 2 ? two[r].w : two[r].y;
                    next_scale[r] = __uint_as_float(high[r]), plus[r] = __uint_as_float(low[r]);
                }
            } else if (SCALES > 0 && step % SPAN == 0) {
                const int group = step / SPAN;
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int from = group % 2 * 16 + 8 * r + lane / 4;
                    const u32 scale = __shfl_sync(~0u, loaded.scales[group / 2], from);
                    next_scale[r] = __uint_as_float(scale);
                    high[r] = __byte_perm(scale, 0, 0x1010);
                    low[r] = __byte_perm(scale, 0, 0x3232);
                    if (ZERO) less[r] = __shfl_sync(~0u, loaded.lesser[group / 2], from);
                    plus[r] = __uint_as_float(less[r]);
                    if (OFFSET) {
                        const u32 two = __shfl_sync(~0u, loaded.lesser[group / 2], from);
                        less[r] = __byte_perm(two, 0, 0x1010);
                        rest[r] = __byte_perm(two, 0, 0x3232);
                    }
                }
            }
            const u32 nibble = EIGHT ? 0 : step / 2 % 2;
            u32(&w)[4] = a[turn % 2][s];
            const u32 first = step % 2 ? codes.z : codes.x, second = step % 2 ? codes.w : codes.y;
            if (CODE == 5) {
                if (nibble == 0) {
                    decode_nf4(first, loaded.nf4, both[step % 2][0], both[step % 2][1]);
                    decode_nf4(second, loaded.nf4, both[step % 2][2], both[step % 2][3]);
                }
#pragma unroll
                for (int i = 0; i < 4; ++i) w[i] = both[step % 2][i][nibble];
            } else if (FLOATS) {
                decode_scaled(first, next_scale, plus, w[0], w[1]);
                decode_scaled(second, next_scale, plus, w[2], w[3]);
            } else if (SMALL) {
                decode_small(first, nibble, w[0], w[1]);
                decode_small(second, nibble, w[2], w[3]);
            } else {
                decode(first, nibble, less, w[0], w[1], upper, step % 2 * 2);
                decode(second, nibble, less, w[2], w[3], upper, step % 2 * 2 + 1);
            }
            if (SCALES > 0 && !SUMS && !FLOATS)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    w[i] = fma2(w[i], high[i % 2], SHORT ? MINUS_ZERO : fma2(w[i], low[i % 2], rest[i % 2]));
            if (step % (EIGHT ? 2 : 4) == (EIGHT ? 1 : 3) && step < 7) {
                codes = get_4(slot + (load + 1) * BLOCK_BYTES + lane * 16);
                load_upper(upper, slot + (load + 1) * BLOCK_BYTES, lane);
            }
        }
        if (SUMS && turn == 0) {
            product_wait<0>();
            release_last(shared, before);
            pin(sums.part);
            sums.add_part();
#pragma unroll
            for (int r = 0; r < 2; ++r) sums.scale[r] = next_scale[r];
        }
        if (turn % (TURNS / 2) == 0) shared.wait(ring.stage + turn / (TURNS / 2), ring.parity);
        product_fence();
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            const int step = turn * STEPS + s;
            const u32 at = x + (step / 4 * X_BYTES >> 4) + step % 4 * 2;
            if constexpr (SUMS) {
                if (step == 0) product<0>(sums.part, a[turn % 2][s], at);
                else product<1>(sums.part, a[turn % 2][s], at);
            } else {
                product<1>(sums_of<HALVED>(sums.whole), a[turn % 2][s], at);
            }
        }
        product_commit();
        if (EARLY && turn == 0) ahead.copy();
    }
    if (EARLY) loaded.load(next, lane);
}
