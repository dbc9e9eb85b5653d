// Besides cuda_on_cpu.h, what products of whole rows need: tensor copies, products of float16, conversions of codes.
#pragma once
#include "cuda_on_cpu.h"

#define __grid_constant__

struct TensorMap {  // base, bytes of an element, rank, then up to three sizes, two strides and three sizes of the box
    u64 words[16];
};

namespace cpu {

alignas(16) inline const unsigned char zeros[16] = {};

// A box lands at once, as its parts of 16 bytes; a few come very late.
inline void copy_box(u32 target, const TensorMap* map, u32 barrier, const int (&at)[3]) {
    const u64 *w = map->words, *shape = w + 3, *strides = w + 6, *size = w + 8, item = w[1];
    const int wait = rand() % 8 ? rand() % 50 : rand() % 3000;
    const bool deep = w[2] > 2;
    u32 to = target;
    for (u64 z = 0; z < (deep ? size[2] : 1); ++z)
        for (u64 y = 0; y < size[1]; ++y)
            for (u64 x = 0; x < size[0]; x += 16 / item, to += 16) {
                const u64 i[3] = {at[0] + x, at[1] + y, deep ? at[2] + z : 0};
                const bool inside = i[0] < shape[0] && i[1] < shape[1] && (!deep || i[2] < shape[2]);
                const u64 from = w[0] + i[0] * item + i[1] * strides[0] + (deep ? i[2] * strides[1] : 0);
                const u32 swizzled = to ^ (to >> 7 & 7) << 4;
                block().bulk.push_back({swizzled, inside ? (const unsigned char*)from : zeros, 16, barrier, wait});
            }
}

inline float half_of(u32 bits) { return ::of_half(bits); }
inline u32 half_bits(float x) {
    const _Float16 h = _Float16(x);
    unsigned short bits;
    memcpy(&bits, &h, 2);
    return bits;
}
inline float e4m3(u32 code) {
    const int exponent = code >> 3 & 15, fraction = code & 7;
    const float size = exponent ? ldexpf(8 + fraction, exponent - 10) : ldexpf(fraction, -9);
    return code & 128 ? -size : size;
}

// mma.m16n8k16, its operands' elements as floats by `value`.
inline void mma(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], float (*value)(u32)) {
    auto& given = warp().shared;
    for (int i = 0; i < 4; ++i) given[lane()][i] = a[i];
    for (int i = 0; i < 2; ++i) given[lane()][4 + i] = b[i];
    __syncwarp();
    auto at = [&](int from, int word, int k) { return value(u32(given[from][word]) >> 16 * (k % 2) & 0xffff); };
    for (int i = 0; i < 4; ++i) {
        const int row = lane() / 4 + i / 2 * 8, column = lane() % 4 * 2 + i % 2;
        for (int k = 0; k < 16; ++k)
            d[i] += at(row % 8 * 4 + k % 8 / 2, row / 8 + k / 8 * 2, k) * at(column * 4 + k % 8 / 2, 4 + k / 8, k);
    }
    __syncwarp();
}

}  // namespace cpu

inline void prefetch_map(const TensorMap*) {}
inline void copy_2d(u32 target, const TensorMap* map, u32 barrier, int x, int y) {
    cpu::copy_box(target, map, barrier, {x, y, 0});
}
inline void copy_3d(u32 target, const TensorMap* map, u32 barrier, int x, int y, int z) {
    cpu::copy_box(target, map, barrier, {x, y, z});
}
inline void load_4(u32 (&r)[4], u32 address) { load_matrices(r, address); }
inline void load_2(u32 (&r)[2], u32 address) {
    u32 both[4];
    load_matrices(both, address);
    r[0] = both[0], r[1] = both[1];
}
inline u32 shared_word(u32 address) { return shared_value<u32>(address); }
inline u64 shared_words(u32 address) { return shared_value<u64>(address); }
inline void put_shared(u32 address, u32 value) { shared_value<u32>(address) = value; }
inline void put_shared_2(u32 address, u32 low, u32 high) { shared_value<u64>(address) = low | u64(high) << 32; }
inline void put_shared_4(u32 address, const float (&d)[4]) {
    for (int i = 0; i < 4; ++i) shared_value<float>(address + 4 * i) = d[i];
}
inline u32 larger(u32 a, u32 b) {
    auto of = [](float x, float y) { return max(fabsf(x), fabsf(y)); };
    return pack(of(to_float(a), to_float(b)), of(to_float(a >> 16), to_float(b >> 16)));
}
inline u32 pack_f16(float low, float high) { return cpu::half_bits(low) | cpu::half_bits(high) << 16; }
#if EIGHT
inline void decode(u32 codes, u32& low, u32& high) {
    auto value = [&](int i) {
        const u32 code = codes >> 8 * i & 255;
        return cpu::half_bits(CODE == 1 ? cpu::e4m3(code) : float((signed char)code));
    };
    low = value(0) | value(1) << 16, high = value(2) | value(3) << 16;
}
inline void multiply(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) { cpu::mma(d, a, b, cpu::half_of); }
#else
inline void multiply(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    cpu::mma(d, a, b, [](u32 bits) { return to_float(bits); });
}
#endif
