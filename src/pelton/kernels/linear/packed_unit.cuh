// A unit of packed weights, 128 columns of some panels of 16 rows, times x: part of packed.cu, after whose layout of
// shared memory this is included.
#pragma once

DEVICE void product(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// A word of codes: columns 2q and 2q + 1 of row g, then of row g + 8, as operands. `upper` and `index` as in `bytes_of`.
DEVICE void operands(u32 word, bool high, const u32 (&upper)[2], const Nf4& nf4, int index, u32& a, u32& b) {
    if (CODE == 5) {
        u32 rows[2][2];  // of which the other half's are made once, for both
        decode_nf4(word, nf4, rows[0], rows[1]);
        a = rows[0][high], b = rows[1][high];
    } else if (UPPER) {
        const u32 s = bytes_of(word, high, upper, index);
        a = __byte_perm(s, 0, 0x4140);
        b = __byte_perm(s, 0, 0x4342);
    } else if (CODE == 0 || CODE == 4) {
        const u32 mask = high ? 0x00f000f0 : 0x000f000f;
        a = __byte_perm(word, word, 0x1100) & mask;
        b = __byte_perm(word, word, 0x3322) & mask;
        if (CODE == 4) {  // the sign to bit 15, the rest to bits 6 to 8
            a = (a * (high ? 0x0104 : 0x1040)) & 0x81c081c0;
            b = (b * (high ? 0x0104 : 0x1040)) & 0x81c081c0;
        }
    } else if (CODE == 1) {
        const u32 x = __byte_perm(word, 0, 0x1404), y = __byte_perm(word, 0, 0x3424);
        a = (x & 0x80008000) | ((x >> 4) & 0x07f007f0);
        b = (y & 0x80008000) | ((y >> 4) & 0x07f007f0);
    } else {
        const u32 s = CODE == 2 ? word ^ 0x80808080 : word;
        a = __byte_perm(s, 0, 0x4140);
        b = __byte_perm(s, 0, 0x4342);
    }
}

// Minimums are integers, operands as codes are, of a product with sums of x over groups: of its 16 columns four, or two,
// are a group's, times as many numbers that make up x's sum.
constexpr float MINS_FACTOR = 0x1p120f, MINS_BACK = 0x1p13f;
DEVICE void load_x_parts(u32 (&b)[2], u32 x_sums) {
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    const u32 at = x_sums + (SETS == 8 ? 2 * q : 2 * (q % 2)) * TOKEN_BYTES + g * 4;
    float v[2] = {get(at) * MINS_FACTOR, get(at + TOKEN_BYTES) * MINS_FACTOR};
    const u32 first = pack_bf16(v[0], v[1]);
    v[0] -= low_half(first), v[1] -= high_half(first);
    const u32 second = pack_bf16(v[0], v[1]), third = pack_bf16(v[0] - low_half(second), v[1] - high_half(second));
    b[0] = SETS == 8 || q < 2 ? first : second;
    b[1] = SETS == 8 ? second : q < 2 ? third : 0;
}
// Of the two groups that a lane has of row `row`.
DEVICE u32 load_mins(u32 area, int row) {
    const int q = threadIdx.x % 4;
    return __byte_perm(get_half(mins_at(area, SETS == 8 ? q / 2 : 0, row) + 2 * (q % 2)), 0, 0x4140);
}

// One unit's part of BATCH panels, added to d.
DEVICE void unit(const Block& block, u32 stage, int place, int part, int index, float (&d)[ROWS16][TILES][4]) {
    const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const u32 first = part * ROWS16 * PLACES + place, codes_at = block.base + stage * STAGE_BYTES + first * CODES;
    const u32 areas_at = block.base + stage * STAGE_BYTES + EACH * HALVES * PLACES * CODES + first * AREAS;
    const u32 x_sums_at = block.base + X_SUMS_AT + index * SETS * TOKEN_BYTES;
    constexpr int LOADS = EIGHT ? 4 : 2;
    uint4 codes[ROWS16][LOADS];
#pragma unroll
    for (int i = 0; i < ROWS16; ++i)
#pragma unroll
        for (int j = 0; j < LOADS; ++j)
            codes[i][j] = get_4(codes_at + i * PLACES * CODES + j * (CODES / LOADS) + lane * 16);
    constexpr int SPAN = GROUP == 16 ? 1 : GROUP > 0 ? GROUP / 32 : 4;  // quarters of a scale, or of TWICE
    constexpr int TWICE = GROUP == 16 ? 2 : 1;
    // Of sums, so that products wait less for each other.
    constexpr int CHAINS = TILES == 1 || TWICE == 2 ? 2 : 1;
    float sums[CHAINS][ROWS16][TILES][4];
    float small[ROWS16][TILES][4];  // scaled by integers
    u32 scales[ROWS16][2], upper[ROWS16][2];
    Nf4 nf4;
    if (CODE == 5) keep(nf4, block.base >> 31);
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
        const int set = quarter / SPAN * TWICE;
        u32 x[TILES][4];
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
            const int row = t * 8 + (TOKENS < 8 ? min(lane % 8, TOKENS - 1) : lane % 8);
            const u32 at = block.base + X_AT + row * X_STRIDE + index * (UNIT * 2) + quarter * 64 + lane / 8 * 16;
            load_matrices(x[t], at);
        }
        if (SUPER_SCALES && set % 4 == 0)
#pragma unroll
            for (int i = 0; i < ROWS16; ++i)
#pragma unroll
                for (int h = 0; h < 2; ++h) scales[i][h] = get_word(scales_at(areas_at + i * PLACES * AREAS, set / 4, g + 8 * h));
        if (UPPER && quarter % 2 == 0)
#pragma unroll
            for (int i = 0; i < ROWS16; ++i) load_upper(upper[i], codes_at + i * PLACES * CODES + quarter / 2 * BLOCK_BYTES, lane);
        if (quarter % SPAN == 0) {
            float2 x_sum[TWICE][TILES];
            if (SHIFTED)
#pragma unroll
                for (int c = 0; c < TWICE; ++c)
#pragma unroll
                    for (int t = 0; t < TILES; ++t) x_sum[c][t] = get_2(x_sums_at + (set + c) * TOKEN_BYTES + t * 32 + q * 8);
#pragma unroll
            for (int i = 0; i < ROWS16; ++i) {
                float less[2] = {MIDDLE ? -float(MIDDLE) : -128.0f, MIDDLE ? -float(MIDDLE) : -128.0f};
                if (ZERO)
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        const u32 at = areas_at + i * PLACES * AREAS + set * AREA + 16 * SCALE_BYTES + g + 8 * h;
                        less[h] = 8388608.0f - __uint_as_float(0x4b000000 | get_byte(at));
                    }
#pragma unroll
                for (int c = 0; c < CHAINS; ++c)
#pragma unroll
                    for (int t = 0; t < TILES; ++t)
#pragma unroll
                        for (int e = 0; e < 4; ++e) {
                            const float sum = c < TWICE ? e % 2 ? x_sum[c % TWICE][t].y : x_sum[c % TWICE][t].x : 0.0f;
                            sums[c][i][t][e] = SHIFTED && c < TWICE ? less[e / 2] * sum : 0.0f;
                        }
            }
        }
#pragma unroll
        for (int i = 0; i < ROWS16; ++i) {
            const uint4 w = codes[i][EIGHT ? quarter : quarter / 2];
            const bool high = !EIGHT && quarter % 2 == 1;
            u32 a[2][4];
            operands(w.x, high, upper[i], nf4, 0, a[0][0], a[0][1]);
            operands(w.y, high, upper[i], nf4, 1, a[0][2], a[0][3]);
            operands(w.z, high, upper[i], nf4, 2, a[1][0], a[1][1]);
            operands(w.w, high, upper[i], nf4, 3, a[1][2], a[1][3]);
#pragma unroll
            for (int step = 0; step < 2; ++step)
#pragma unroll
                for (int t = 0; t < TILES; ++t)
                    product(sums[CHAINS == 2 ? step : 0][i][t], a[step], x[t][2 * step], x[t][2 * step + 1]);
        }
        if (quarter % SPAN != SPAN - 1) continue;
        float2 x_sum[TWICE][TILES];
        if (OFFSET && !SUPER_SCALES)
#pragma unroll
            for (int t = 0; t < TILES; ++t) x_sum[0][t] = get_2(x_sums_at + set * TOKEN_BYTES + t * 32 + q * 8);
#pragma unroll
        for (int i = 0; i < ROWS16; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h)
#pragma unroll
                for (int c = 0; c < TWICE; ++c) {
                    Scale s = {1.0f, 0.0f};
                    if (SUPER_SCALES) s.scale = small_scale(scales[i][h], (set + c) % 4);
                    else if (GROUP > 0) s = scale_at(areas_at + i * PLACES * AREAS, set + c, g + 8 * h);
#pragma unroll
                    for (int t = 0; t < TILES; ++t)
#pragma unroll
                        for (int e = 2 * h; e < 2 * h + 2; ++e) {
                            const bool both = CHAINS == 2 && TWICE == 1;
                            const float sum = both ? sums[0][i][t][e] + sums[CHAINS - 1][i][t][e] : sums[c % CHAINS][i][t][e];
                            float& to = SUPER_SCALES ? small[i][t][e] : d[i][t][e];
                            to = SUPER_SCALES && set + c == 0 ? s.scale * sum : to + s.scale * sum;
                            if (OFFSET && !SUPER_SCALES) to += s.offset * (e % 2 ? x_sum[0][t].y : x_sum[0][t].x);
                        }
                }
    }
    if (!SUPER_SCALES) return;
    u32 x_parts[TILES][2];
    if (OFFSET)
#pragma unroll
        for (int t = 0; t < TILES; ++t) load_x_parts(x_parts[t], x_sums_at + t * 32);
#pragma unroll
    for (int i = 0; i < ROWS16; ++i) {
        const u32 area = areas_at + i * PLACES * AREAS;
        const u32 two[2] = {super_of(area, g), super_of(area, g + 8)};
        const u32 mins[2] = {OFFSET ? load_mins(area, g) : 0, OFFSET ? load_mins(area, g + 8) : 0};
        const u32 a[4] = {mins[0], mins[1], mins[0], mins[1]};
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
            float less[4] = {};
            if (OFFSET) product(less, a, x_parts[t][0], x_parts[t][1]);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                d[i][t][e] += low_as_float(two[e / 2]) * small[i][t][e];
                if (OFFSET) d[i][t][e] -= high_as_float(two[e / 2]) * MINS_BACK * less[e];
            }
        }
    }
}
