// A unit of packed weights, 128 columns of some panels of 16 rows, times x: part of packed.cu, after whose layout of
// shared memory this is included.
#pragma once

DEVICE void product(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// A word of codes: columns 2q and 2q + 1 of row g, then of row g + 8, as operands.
DEVICE void operands(u32 word, bool high, u32& a, u32& b) {
    if (CODE == 0 || CODE == 4) {
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

// One unit's part of BATCH panels, added to d.
DEVICE void unit(const Block& block, u32 stage, int place, int part, int index, float (&d)[ROWS16][TILES][4]) {
    const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const u32 first = part * ROWS16 * PLACES + place, codes_at = block.base + stage * STAGE_BYTES;
    const u32 areas_at = codes_at + EACH * HALVES * PLACES * CODES;
    uint4 codes[ROWS16][CODES / 512];
#pragma unroll
    for (int i = 0; i < ROWS16; ++i)
#pragma unroll
        for (int j = 0; j < int(CODES / 512); ++j)
            codes[i][j] = get_4(codes_at + (first + i * PLACES) * CODES + j * 512 + lane * 16);
    constexpr int SPAN = GROUP > 0 ? GROUP / 32 : 4;  // quarters of a scale
    constexpr int CHAINS = TILES == 1 ? 2 : 1;  // of sums, so that products wait less for each other
    float sums[ROWS16][TILES][4], more[ROWS16][TILES][4];
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
        const int set = quarter / SPAN;
        u32 x[TILES][4];
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
            const int row = t * 8 + (TOKENS < 8 ? min(lane % 8, TOKENS - 1) : lane % 8);
            const u32 at = block.base + X_AT + row * X_STRIDE + index * (UNIT * 2) + quarter * 64 + lane / 8 * 16;
            load_matrices(x[t], at);
        }
        if (quarter % SPAN == 0) {
            float2 x_sum[TILES];
            if (SHIFTED)
#pragma unroll
                for (int t = 0; t < TILES; ++t)
                    x_sum[t] = get_2(block.base + X_SUMS_AT + (index * SETS + set) * TOKEN_BYTES + t * 32 + q * 8);
#pragma unroll
            for (int i = 0; i < ROWS16; ++i) {
                float less[2] = {-128.0f, -128.0f};
                if (ZERO)
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        const u32 at = areas_at + (first + i * PLACES) * AREAS + set * AREA + 16 * SCALE_BYTES + g + 8 * h;
                        less[h] = 8388608.0f - __uint_as_float(0x4b000000 | get_byte(at));
                    }
#pragma unroll
                for (int t = 0; t < TILES; ++t)
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        sums[i][t][2 * h] = SHIFTED ? less[h] * x_sum[t].x : 0.0f;
                        sums[i][t][2 * h + 1] = SHIFTED ? less[h] * x_sum[t].y : 0.0f;
                        if (CHAINS == 2) more[i][t][2 * h] = more[i][t][2 * h + 1] = 0.0f;
                    }
            }
        }
#pragma unroll
        for (int i = 0; i < ROWS16; ++i) {
            const uint4 w = codes[i][EIGHT ? quarter : quarter / 2];
            const bool high = !EIGHT && quarter % 2 == 1;
            u32 a[2][4];
            operands(w.x, high, a[0][0], a[0][1]);
            operands(w.y, high, a[0][2], a[0][3]);
            operands(w.z, high, a[1][0], a[1][1]);
            operands(w.w, high, a[1][2], a[1][3]);
#pragma unroll
            for (int step = 0; step < 2; ++step)
#pragma unroll
                for (int t = 0; t < TILES; ++t)
                    product(step < CHAINS - 1 ? more[i][t] : sums[i][t], a[step], x[t][2 * step], x[t][2 * step + 1]);
        }
        if (quarter % SPAN != SPAN - 1) continue;
#pragma unroll
        for (int i = 0; i < ROWS16; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float scale = 1.0f;
                if (GROUP > 0) {
                    const u32 at = areas_at + (first + i * PLACES) * AREAS + set * AREA + (g + 8 * h) * SCALE_BYTES;
                    scale = HALF_SCALES ? scale_of(get_half(at)) : get(at);
                }
#pragma unroll
                for (int t = 0; t < TILES; ++t)
#pragma unroll
                    for (int e = 2 * h; e < 2 * h + 2; ++e)
                        d[i][t][e] += scale * (CHAINS == 2 ? sums[i][t][e] + more[i][t][e] : sums[i][t][e]);
            }
    }
}
