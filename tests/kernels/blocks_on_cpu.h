// What hopper_blocks.cu has besides (cuda_on_cpu.h): tensor copies of bytes in boxes of 128 columns, also to all blocks
// of a cluster, products of codes (e4m3) by warp groups, which end as they begin, other blocks' shared memory.
#pragma once
#include "cuda_on_cpu.h"
#ifndef BYTES
#define BYTES 1  // of an element
#endif
struct TensorMap {
    const unsigned char* base;
    int columns, rows, box_rows, half;  // half: rows of gates, of which eights take turns with those of ups; 0: no
};
inline void prefetch_map(const TensorMap*) {}
// Chunks of 16 bytes, swizzled; what is past the end is zeros.
inline void copy_box(u32 target, const TensorMap* map, u32 barrier, int x, int y, cpu::Block& to_block) {
    static const unsigned char zeros[16] = {};
    for (int i = 0; i < map->box_rows * 8; ++i) {
        int row = y + i / 8;
        bool inside = row < map->rows;
        if (map->half) {
            row = y + i / 8 / 16 * 8 + i / 8 % 8, inside = row < map->half;
            if (i / 8 % 16 >= 8) row += map->half;
        }
        const u32 to = target + 16 * i, swizzled = to ^ (to >> 7 & 7) << 4;
        const int at = x * BYTES + 16 * (i % 8), width = map->columns * BYTES;
        const unsigned char* from = map->base + long(row) * width + at;
        to_block.bulk.push_back({swizzled, inside && at < width ? from : zeros, 16, barrier, rand() % 50});
    }
}
inline void copy_2d(u32 target, const TensorMap* map, u32 barrier, int x, int y) {
    copy_box(target, map, barrier, x, y, cpu::block());
}
inline void copy_rows(u32 target, const TensorMap* map, u32 barrier, int column, int row, unsigned short blocks) {
    if (SHARE == 1) return copy_box(target, map, barrier, column, row, cpu::block());
    for (int rank = 0; rank < 16; ++rank)
        if (blocks >> rank & 1) copy_box(target, map, barrier, column, row, cpu::blocks[rank]);
}
inline void copy_floats(u32 target, const float* from, u32 count, u32 barrier) {
    copy_bytes(target, (const unsigned char*)from, 4 * count, barrier);
}
inline void arrive_at_block(u32 barrier, int rank) {
    cpu::Barrier& there = cpu::blocks[rank].barriers.at(barrier);
    --there.left;
    there.settle();
}
inline u32 of_block(u32 address, int rank) { return mapped(address, rank); }
template <typename T>
inline T __ldcg(const T* at) {
    return *at;
}
inline float reciprocal(float v) { return 1.0f / v; }
inline float low_half(u32 w) { return to_float(w); }
inline void transpose(u32 (&w)[4]) {  // lane 4 g + i has word 4 g + j of group i where it had word i of group j
    u32 found[4];
    for (int j = 0; j < 4; ++j)
        for (int from = 0; from < 4; ++from) {
            const u32 given = __shfl_sync(~0u, w[j], cpu::lane() / 4 * 4 + from);
            if (j == cpu::lane() % 4) found[from] = given;
        }
    for (int j = 0; j < 4; ++j) w[j] = found[j];
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
inline void registers_less() {}
template <int N>
inline void registers_more() {}

inline unsigned char swizzled_byte(u32 at) { return shared_value<unsigned char>(at ^ (at >> 7 & 7) << 4); }
// A warp's 16 rows of wgmma.m64nNk32 of codes; a and b describe rows of 32.
template <int N>
inline void multiply(float (&d)[N], u64 a, u64 b, u32 add) {
    for (int i = 0; i < N; ++i) {
        const int row = threadIdx.x / 32 % 4 * 16 + cpu::lane() / 4 + i / 2 % 2 * 8;
        const int column = i / 4 * 8 + cpu::lane() % 4 * 2 + i % 2;
        const u32 of_a = ((a & 0x3fff) << 4) + row * 128, of_b = ((b & 0x3fff) << 4) + column * 128;
        float sum = add ? d[i] : 0.0f;
        for (int k = 0; k < 32; ++k) sum += of_e4m3(swizzled_byte(of_a + k)) * of_e4m3(swizzled_byte(of_b + k));
        d[i] = sum;
    }
    __syncwarp();
}
