// Scales, offsets and upper bits of packed weights in shared memory (gpu_layouts.py, gpu_gguf.py), after decode.cuh and shared.cuh.
#pragma once

DEVICE u32 get_word(u32 at) { return __float_as_uint(get(at)); }
DEVICE float low_as_float(u32 halves) { return of_half(halves & 0xffff); }
DEVICE float high_as_float(u32 halves) { return of_half(halves >> 16); }

// The upper bits of a lane's codes of a block.
DEVICE void load_upper(u32 (&upper)[2], u32 codes, int lane) {
    if (UPPER == 1) upper[0] = get_word(codes + 512 + lane * 4);
    if (UPPER == 2) {
        const float2 w = get_2(codes + 512 + lane * 8);
        upper[0] = __float_as_uint(w.x), upper[1] = __float_as_uint(w.y);
    }
}

// An integer of up to 22 bits.
DEVICE float of_integer(int x) { return __uint_as_float(0x4b400000u + u32(x)) - 12582912.0f; }

// SUPER_SCALES: of 16 rows and 128 columns at `area`, what a row has for all groups; of four groups, `quad`, the scales and
// the minimums, a byte each.
DEVICE u32 super_of(u32 area, int row) { return OFFSET ? get_word(area + 4 * row) : get_half(area + 2 * row); }
DEVICE u32 scales_at(u32 area, int quad, int row) { return area + 32 * PAIR + quad * 64 + 4 * row; }
DEVICE u32 mins_at(u32 area, int quad, int row) { return scales_at(area, 128 / GROUP / 4 + quad, row); }
DEVICE float small_scale(u32 byte) { return of_integer(OFFSET ? int(byte) : int(byte ^ 0x80) - 0x80); }
// The same of the k-th byte of a word of scales.
DEVICE float small_scale(u32 word, int k) {
    const u32 bits = __byte_perm(OFFSET ? word : word ^ 0x80808080, 0x4b400000, 0x7650 + k);
    return __uint_as_float(bits) - (OFFSET ? 12582912.0f : 12582912.0f + 128.0f);
}

struct Scale {
    float scale, offset;  // 0: none
};
// Of a group of a row, of those of 128 columns from `areas` on; GROUP is 128 at most.
DEVICE Scale scale_at(u32 areas, int group, int row) {
    if (SUPER_SCALES) {
        const u32 two = super_of(areas, row);
        const float scale = low_as_float(two) * small_scale(get_byte(scales_at(areas, group / 4, row) + group % 4));
        return {scale, OFFSET ? -high_as_float(two) * of_integer(get_byte(mins_at(areas, group / 4, row) + group % 4)) : 0.0f};
    }
    const u32 area = areas + group * AREA;
    if (OFFSET) {
        const u32 two = get_word(area + 4 * row);
        return {low_as_float(two), high_as_float(two)};
    }
    const u32 at = area + SCALE_BYTES * row;
    return {BYTE_SCALES ? scale_of(get_byte(at)) : HALF_SCALES ? scale_of(get_half(at)) : get(at), 0.0f};
}
