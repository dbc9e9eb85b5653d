// What hopper_products.cu has besides (blocks_on_cpu.h), of bfloat16: tensor copies of boxes of 64 columns, products of
// elements by warp groups.
#pragma once
#define multiply multiply_codes
#define BYTES 2
#include "blocks_on_cpu.h"
#undef multiply
inline void pin(int&) {}
inline void pin(float&) {}

inline float swizzled_element(u32 at) { return to_float(shared_value<unsigned short>(at ^ (at >> 7 & 7) << 4)); }
// A warp's 16 rows of wgmma.m64nNk16; a and b describe rows of 16.
template <int N>
inline void multiply(float (&d)[N], u64 a, u64 b, u32 add) {
    for (int i = 0; i < N; ++i) {
        const int row = threadIdx.x / 32 % 4 * 16 + cpu::lane() / 4 + i / 2 % 2 * 8;
        const int column = i / 4 * 8 + cpu::lane() % 4 * 2 + i % 2;
        const u32 of_a = ((a & 0x3fff) << 4) + row * 128, of_b = ((b & 0x3fff) << 4) + column * 128;
        float sum = add ? d[i] : 0.0f;
        for (int k = 0; k < 32; k += 2) sum += swizzled_element(of_a + k) * swizzled_element(of_b + k);
        d[i] = sum;
    }
    __syncwarp();
}
