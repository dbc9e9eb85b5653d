// Besides cuda_on_cpu.h, what products of whole rows need: barriers with bytes to come, tensor copies that land in
// any order, products of float16, conversions of codes.
#pragma once
#include "cuda_on_cpu.h"

#include <map>
#include <random>

#define __grid_constant__

struct TensorMap {  // base, bytes of an element, rank, then up to three sizes, two strides and three sizes of the box
    u64 words[16];
};

namespace cpu {

struct Barrier {
    int needed = 0, arrived = 0, bytes = 0, phase = 0;
    void settle() {
        if (arrived == needed && bytes == 0) arrived = 0, ++phase;
    }
};
struct Box {
    u32 target;
    const TensorMap* map;
    u32 barrier;
    int at[3];
};

inline std::map<u32, Barrier> barriers;
inline std::map<u32, Meeting> named;
inline std::vector<Box> coming;
inline std::mt19937 random;

inline void land(const Box& box) {
    const u64* w = box.map->words;
    const u64 item = w[1], rank = w[2];
    const u64* shape = w + 3;
    const u64* strides = w + 6;
    const u64* size = w + 8;
    u32 written = 0;
    for (u64 z = 0; z < (rank > 2 ? size[2] : 1); ++z)
        for (u64 y = 0; y < size[1]; ++y)
            for (u64 x = 0; x < size[0]; ++x, written += item) {
                const u64 i[3] = {box.at[0] + x, box.at[1] + y, rank > 2 ? box.at[2] + z : 0};
                const bool inside = i[0] < shape[0] && i[1] < shape[1] && (rank < 3 || i[2] < shape[2]);
                const u64 from = w[0] + i[0] * item + i[1] * strides[0] + (rank > 2 ? i[2] * strides[1] : 0);
                u32 to = box.target + written;
                to ^= (to >> 7 & 7) << 4;  // the swizzle of 128 bytes
                if (inside) memcpy(shared_memory() + to, (const void*)from, item);
                else memset(shared_memory() + to, 0, item);
            }
    Barrier& barrier = barriers.at(box.barrier);
    barrier.bytes -= written;
    barrier.settle();
}

// One that is waited for lets others go on, and at times a copy land, whichever.
inline void idle() {
    if (!coming.empty() && random() % 4096 == 0) {
        std::swap(coming[random() % coming.size()], coming.back());
        const Box box = coming.back();
        coming.pop_back();
        land(box);
    }
    leave();
}

inline u32 map2(u32 a, u32 b, float (*f)(float, float)) {
    return pack(f(of_bits(a << 16), of_bits(b << 16)), f(of_bits(a & 0xffff0000), of_bits(b & 0xffff0000)));
}
inline float half_of(u32 bits) {
    const unsigned short h = bits;
    _Float16 x;
    memcpy(&x, &h, 2);
    return float(x);
}
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

inline float __uint_as_float(u32 bits) { return cpu::of_bits(bits); }
inline u32 __float_as_uint(float x) { return cpu::bits_of(x); }
inline float __expf(float x) { return expf(x); }
inline u32 __shfl_sync(u32, u32 x, int from) {
    cpu::warp().shared[cpu::lane()][0] = x;
    __syncwarp();
    const u32 y = cpu::warp().shared[from][0];
    __syncwarp();
    return y;
}
inline u32 __shfl_xor_sync(u32 all, u32 x, int mask) { return __shfl_sync(all, x, cpu::lane() ^ mask); }

inline u32 __reduce_max_sync(u32, u32 x) {
    for (int i = 1; i < 32; i *= 2) x = max(x, __shfl_xor_sync(~0u, x, i));
    return x;
}

inline void barrier_init(u32 barrier, u32 arrivals) { cpu::barriers[barrier] = {int(arrivals)}; }
inline void barrier_init_fence() {}
inline void barrier_arrive(u32 barrier) {
    ++cpu::barriers.at(barrier).arrived;
    cpu::barriers.at(barrier).settle();
}
inline void barrier_expect(u32 barrier, u32 bytes) {
    cpu::barriers.at(barrier).bytes += bytes;
    barrier_arrive(barrier);
}
inline void barrier_wait(u32 barrier, u32 parity) {
    while (u32(cpu::barriers.at(barrier).phase % 2) == parity) cpu::idle();
}
inline void named_sync(u32 id, u32 threads) {
    cpu::named[id].needed = threads;
    cpu::meet(cpu::named[id]);
}
inline void prefetch_map(const TensorMap*) {}
inline void copy_2d(u32 target, const TensorMap* map, u32 barrier, int x, int y) {
    cpu::coming.push_back({target, map, barrier, {x, y, 0}});
}
inline void copy_3d(u32 target, const TensorMap* map, u32 barrier, int x, int y, int z) {
    cpu::coming.push_back({target, map, barrier, {x, y, z}});
}

inline void load_4(u32 (&r)[4], u32 address) { load_matrices(r, address); }
inline void load_2(u32 (&r)[2], u32 address) {
    u32 both[4];
    load_matrices(both, address);
    r[0] = both[0], r[1] = both[1];
}
inline u32 shared_word(u32 address) {
    u32 y;
    memcpy(&y, shared_memory() + address, 4);
    return y;
}
inline u64 shared_words(u32 address) { return shared_word(address) | u64(shared_word(address + 4)) << 32; }
inline void put_shared(u32 address, u32 value) { memcpy(shared_memory() + address, &value, 4); }
inline void put_shared_2(u32 address, u32 low, u32 high) { put_shared(address, low), put_shared(address + 4, high); }
inline void put_shared_4(u32 address, const float (&d)[4]) { memcpy(shared_memory() + address, d, 16); }
inline u32 times(u32 a, u32 b) {
    return cpu::map2(a, b, [](float x, float y) { return x * y; });
}
inline u32 larger(u32 a, u32 b) {
    return cpu::map2(a, b, [](float x, float y) { return std::max(fabsf(x), fabsf(y)); });
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
    cpu::mma(d, a, b, [](u32 bits) { return cpu::of_bits(bits << 16); });
}
#endif
