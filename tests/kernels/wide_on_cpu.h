// What hopper_wide.cu has besides (cuda_on_cpu.h): tensor copies of bfloat16 in boxes of 64 columns, products of warp
// groups, which end as they begin, and other blocks' shared memory.
#pragma once
#include "cuda_on_cpu.h"
struct TensorMap {
    const unsigned short* base;
    int columns, rows, box_rows;
};
inline void prefetch_map(const TensorMap*) {}
// Chunks of 16 bytes, swizzled; rows past the end are zeros.
inline void copy_2d(u32 target, const TensorMap* map, u32 barrier, int x, int y) {
    static const unsigned char zeros[16] = {};
    const int wait = rand() % 8 ? rand() % 50 : rand() % 500;  // some behind many that were begun later
    for (int i = 0; i < map->box_rows * 8; ++i) {
        const int row = i / 8;
        const u32 to = target + 16 * i, swizzled = to ^ (to >> 7 & 7) << 4;
        const auto* from = (const unsigned char*)(map->base + long(y + row) * map->columns + x) + 16 * (i % 8);
        cpu::block().bulk.push_back({swizzled, y + row < map->rows ? from : zeros, 16, barrier, wait});
    }
}
inline u64 matrix(u32 address, u32 group, u32 column) {
    return 1ull << 62 | u64(group >> 4) << 32 | u64(column >> 4) << 16 | (address & 0x3ffff) >> 4;
}
inline void product_fence() {}
inline void product_commit() {}
template <int PENDING>
inline void product_wait() {}
template <int N>
inline void pin(float (&)[N]) {}
template <int N>
inline void pin(u32 (&)[N]) {}
inline void pin(uint4&) {}
inline int this_lane() { return cpu::lane(); }
inline void copy_chunk_if(bool wanted, u32 target, const void* source) {
    if (wanted) copy_chunk(target, source);
}
inline void put_2(u32 at, u32 x, u32 y) { shared_value<uint2>(at) = {x, y}; }
template <int N>
inline void registers_less() {}
template <int N>
inline void registers_more() {}
inline void fence_async() {}

// A warp's 16 rows of wgmma.m64nNk16, `b` the low half of a description of N rows of 16 columns.
template <int ADD, int N>
inline void product(float (&d)[N], const u32 (&a)[4], u32 b) {
    auto& given = cpu::warp().shared;
    for (int i = 0; i < 4; ++i) given[cpu::lane()][i] = a[i];
    __syncwarp();
    for (int i = 0; i < N; ++i) {
        const int row = cpu::lane() / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + cpu::lane() % 4 * 2 + i % 2;
        float sum = ADD ? d[i] : 0.0f;
        for (int k = 0; k < 16; ++k) {
            const float left = to_float(given[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2] >> 16 * (k % 2));
            const u32 at = ((b & 0x3fff) << 4) + column * 128 + 2 * k;
            sum += left * to_float(shared_value<unsigned short>(at ^ (at >> 7 & 7) << 4));
        }
        d[i] = sum;
    }
    __syncwarp();
}

// A lane's values of each matrix: rows 2 (lane % 4) and the next, column lane / 4.
inline void put_transposed(u32 at, u32 a, u32 b) {
    auto& given = cpu::warp().shared;
    given[cpu::lane()][0] = at;
    __syncwarp();
    const u32 words[2] = {a, b};
    for (int i = 0; i < 2; ++i)
        for (int e = 0; e < 2; ++e) {
            const u32 row = given[8 * i + cpu::lane() % 4 * 2 + e][0];
            shared_value<unsigned short>(row + cpu::lane() / 4 * 2) = words[i] >> 16 * e;
        }
    __syncwarp();
}

// Addresses of the cluster's shared memory: the block's number above the place in it.
inline u32 place_of(u32 at, u32 rank) { return at | rank << 24; }
inline void send_4(const float (&v)[4], u32 there, u32 barrier) { cpu::send(v, sizeof v, there, barrier); }
