// Runs a CUDA C++ kernel on a CPU: every thread of a cluster is a fiber of one thread, which goes on when all that
// it meets have come. What a kernel does by PTX is done here by the letter of the PTX ISA (bfloat16 alone): layouts
// of mma and ldmatrix, copies that land as late as they may, shared memory of other blocks.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

typedef unsigned int u32;
typedef unsigned long long u64;
using std::max;
using std::min;

#define DEVICE inline
#define __align__(n)
#define __global__
#define __launch_bounds__(n)
#define __shared__ static  // of a cluster of one block
#define threadIdx (cpu::now->thread)
#define blockIdx (cpu::now->block)
#define gridDim (cpu::grid)

struct int4 {
    int x, y, z, w;
};
struct float2 {
    float x, y;
};
struct float4 {
    float x, y, z, w;
};
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }

namespace cpu {

struct Index {
    int x, y, z;
};
struct Meeting {
    int needed = 0, arrived = 0, turn = 0;
};
struct Copy {
    void* target;
    const void* source;
};
struct Warp {
    Meeting meeting;
    u64 shared[32][6];  // what its lanes give each other
};
struct Block {
    std::vector<unsigned char> memory;
    Meeting meeting;
    std::vector<Warp> warps;
};
constexpr int STACK = 1 << 16;
struct Fiber {
    ucontext_t context;  // to begin with; from then on `place`, which takes no call of the system
    jmp_buf place;
    bool begun = false;
    std::unique_ptr<char[]> stack{new char[STACK]};
    bool done = false;
    Index thread, block;
    std::vector<Copy> open;
    std::vector<std::vector<Copy>> groups;
};

inline Index grid = {1, 1, 1};
inline int first = 0;  // block of the cluster
inline Fiber* now;
inline jmp_buf scheduler;
inline std::vector<Block> blocks;
inline Meeting cluster;
inline std::function<void()> kernel;

inline Block& block() { return blocks[now->block.x - first]; }
inline Warp& warp() { return block().warps[now->thread.x / 32]; }
inline int lane() { return now->thread.x % 32; }

inline void leave() {
    if (!_setjmp(now->place)) _longjmp(scheduler, 1);
}
__attribute__((noinline)) inline void resume(Fiber& fiber) {
    now = &fiber;
    if (_setjmp(scheduler)) return;
    if (fiber.begun) _longjmp(fiber.place, 1);
    fiber.begun = true;
    setcontext(&fiber.context);
}

inline void meet(Meeting& meeting) {
    const int turn = meeting.turn;
    if (++meeting.arrived == meeting.needed) {
        meeting.arrived = 0;
        ++meeting.turn;
    } else {
        while (meeting.turn == turn) leave();
    }
}

inline void begin() {
    kernel();
    now->done = true;
    leave();
}

// One cluster of `n` blocks at (y, z) of the grid; false where its threads wait for each other for ever.
inline bool run(int n, int threads, int bytes, int y, int z, std::function<void()> body) {
    kernel = body;
    blocks.assign(n, {});
    for (Block& b : blocks) {
        b.memory.assign(bytes, 0xff);
        b.meeting.needed = threads;
        b.warps.assign(threads / 32, {});
        for (Warp& w : b.warps) w.meeting.needed = 32;
    }
    cluster = {n * threads};
    std::vector<Fiber> fibers(n * threads);
    for (int i = 0; i < n * threads; ++i) {
        Fiber& f = fibers[i];
        f.thread = {i % threads, 0, 0};
        f.block = {first + i / threads, y, z};
        getcontext(&f.context);
        f.context.uc_stack.ss_sp = f.stack.get();
        f.context.uc_stack.ss_size = STACK;
        makecontext(&f.context, begin, 0);
    }
    for (int turns = 0, left = 1; left; ++turns) {
        if (turns > 1000000) return false;
        left = 0;
        for (Fiber& f : fibers) {
            if (f.done) continue;
            resume(f);
            left += !f.done;
        }
    }
    return true;
}

inline float of_bits(u32 bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
inline u32 bits_of(float x) {
    u32 bits;
    memcpy(&bits, &x, 4);
    return bits;
}

}  // namespace cpu

inline float __int_as_float(int bits) { return cpu::of_bits(bits); }
inline int __float_as_int(float x) { return cpu::bits_of(x); }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline int __popc(u32 x) { return __builtin_popcount(x); }
inline int __clz(u32 x) { return x ? __builtin_clz(x) : 32; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float exp2_fast(float x) { return exp2f(x); }
inline float to_float(unsigned short x) { return cpu::of_bits(u32(x) << 16); }
inline unsigned short to_element(float x) {
    const u32 bits = cpu::bits_of(x);
    return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline u32 pack(float low, float high) { return u32(to_element(low)) | u32(to_element(high)) << 16; }

inline unsigned char* shared_memory() { return cpu::block().memory.data(); }
inline u32 shared_address(const void* pointer) { return (const unsigned char*)pointer - shared_memory(); }
inline void __syncthreads() { cpu::meet(cpu::block().meeting); }
inline void __syncwarp() { cpu::meet(cpu::warp().meeting); }
inline void cluster_sync() { cpu::meet(cpu::cluster); }
inline void cluster_arrive() {}
inline void cluster_wait() { cpu::meet(cpu::cluster); }
inline void wait_for_previous() {}
inline void launch_next() {}

// Whole warps only.
template <class T>
inline T __shfl_sync(u32, T x, int lane) {
    memcpy(cpu::warp().shared[cpu::lane()], &x, sizeof x);
    __syncwarp();
    memcpy(&x, cpu::warp().shared[lane], sizeof x);
    __syncwarp();
    return x;
}
template <class T>
inline T __shfl_xor_sync(u32 all, T x, int mask) {
    return __shfl_sync(all, x, cpu::lane() ^ mask);
}
template <class T>
inline T __shfl_up_sync(u32 all, T x, int step) {
    return __shfl_sync(all, x, max(cpu::lane() - step, cpu::lane() < step ? cpu::lane() : 0));
}
inline bool __any_sync(u32 all, bool x) {
    for (int step = 16; step; step /= 2) x |= bool(__shfl_xor_sync(all, x, step));
    return x;
}
inline u32 __reduce_or_sync(u32 all, u32 x) {
    for (int step = 16; step; step /= 2) x |= __shfl_xor_sync(all, x, step);
    return x;
}

// Fibers change only where they meet.
inline void __threadfence() {}
template <class T>
inline T atomicAdd(T* target, T x) {
    const T old = *target;
    *target += x;
    return old;
}
inline void atomicMin(int* target, int x) { *target = min(*target, x); }
inline void atomicMax(int* target, int x) { *target = max(*target, x); }
inline void atomicOr(u32* target, u32 x) { *target |= x; }

// A barrier of one phase: the bytes that it still waits for.
inline int& bytes_of(int rank, u32 barrier) { return *(int*)(cpu::blocks[rank].memory.data() + barrier); }
inline void barrier_init(u32 barrier, u32) { bytes_of(cpu::now->block.x - cpu::first, barrier) = 0; }
inline void barrier_init_fence() {}
inline void barrier_expect(u32 barrier, u32 bytes) { bytes_of(cpu::now->block.x - cpu::first, barrier) += bytes; }
inline void barrier_wait(u32 barrier, u32) {
    while (bytes_of(cpu::now->block.x - cpu::first, barrier)) cpu::leave();
}
inline void send(float x, u32 address, u32 barrier, int rank) {
    memcpy(cpu::blocks[rank].memory.data() + address, &x, 4);
    bytes_of(rank, barrier) -= 4;
}
inline void prefetch(const void*) {}

inline float load_of_block(u32 address, int rank) {
    float x;
    memcpy(&x, cpu::blocks[rank].memory.data() + address, 4);
    return x;
}

inline void copy_chunk(u32 target, const void* source) {
    cpu::now->open.push_back({shared_memory() + target, source});
}
inline void copies_commit() {
    cpu::now->groups.push_back(cpu::now->open);
    cpu::now->open.clear();
}
template <int PENDING>
inline void copies_wait() {
    auto& groups = cpu::now->groups;
    for (; groups.size() > PENDING; groups.erase(groups.begin()))
        for (const cpu::Copy& copy : groups[0]) memcpy(copy.target, copy.source, 16);
}

// Matrix m's row r is at lane 8 m + r's address; a lane has two values of a row, or transposed, of a column.
inline void load(u32 (&x)[4], u32 address, bool transposed) {
    cpu::warp().shared[cpu::lane()][0] = address;
    __syncwarp();
    for (int m = 0; m < 4; ++m) {
        unsigned short pair[2];
        for (int i = 0; i < 2; ++i) {
            int row = cpu::lane() / 4, column = cpu::lane() % 4 * 2 + i;
            if (transposed) std::swap(row, column);
            memcpy(&pair[i], shared_memory() + cpu::warp().shared[8 * m + row][0] + 2 * column, 2);
        }
        x[m] = pair[0] | u32(pair[1]) << 16;
    }
    __syncwarp();
}
inline void load_matrices(u32 (&x)[4], u32 address) { load(x, address, false); }
inline void load_transposed(u32 (&x)[4], u32 address) { load(x, address, true); }

// mma.m16n8k16: d += a @ b.
inline void product(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    auto& given = cpu::warp().shared;
    for (int i = 0; i < 4; ++i) given[cpu::lane()][i] = a[i];
    given[cpu::lane()][4] = b0;
    given[cpu::lane()][5] = b1;
    __syncwarp();
    auto half = [&](int lane, int word, int k) { return to_float(given[lane][word] >> 16 * (k % 2)); };
    for (int i = 0; i < 4; ++i) {
        const int row = cpu::lane() / 4 + i / 2 * 8, column = cpu::lane() % 4 * 2 + i % 2;
        for (int k = 0; k < 16; ++k)
            d[i] += half(row % 8 * 4 + k % 8 / 2, row / 8 + k / 8 * 2, k) * half(column * 4 + k % 8 / 2, 4 + k / 8, k);
    }
    __syncwarp();
}
