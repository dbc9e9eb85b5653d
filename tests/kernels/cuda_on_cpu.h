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
#include <map>
#include <memory>
#include <vector>

typedef unsigned int u32;
typedef unsigned long long u64;
using std::max;
using std::min;

// Whether products are of float16, not of bfloat16.
#if defined(KV_CODE) && KV_CODE
#define PRODUCTS_OF_HALVES 1
#else
#define PRODUCTS_OF_HALVES 0
#endif

#define DEVICE inline
#define __align__(n)
#define __restrict__
#define __global__
#define __launch_bounds__(n)
#define __grid_constant__
#define __shared__ static  // of a cluster of one block
#define threadIdx (cpu::now->thread)
#define blockIdx (cpu::now->block)
#define gridDim (cpu::grid)

struct int4 {
    int x, y, z, w;
};
struct uint2 {
    u32 x, y;
};
struct uint4 {
    u32 x, y, z, w;
};
struct float2 {
    float x, y;
};
struct float4 {
    float x, y, z, w;
};
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
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
// A barrier in shared memory, and what it has still to wait for; copies of bytes that one announces.
struct Barrier {
    int arrivals, left;
    long bytes = 0;
    u32 phase = 0;
    void settle() {
        if (left || bytes) return;
        phase ^= 1;
        left = arrivals;
    }
};
struct Bulk {
    u32 target;
    const unsigned char* source;
    u32 bytes, barrier;
    int wait;
};
struct Warp {
    Meeting meeting;
    u64 shared[32][6];  // what its lanes give each other
};
struct Block {
    std::vector<unsigned char> memory;
    Meeting meeting;
    std::map<u32, Meeting> named;
    std::map<u32, Barrier> barriers;
    std::vector<Bulk> bulk;
    std::vector<Warp> warps;

    // Copies of bytes land in any order, some late.
    void land() {
        for (size_t i = 0; i < bulk.size();) {
            Bulk& copy = bulk[i];
            if (copy.wait-- > 0) {
                ++i;
                continue;
            }
            memcpy(memory.data() + copy.target, copy.source, copy.bytes);
            Barrier& barrier = barriers.at(copy.barrier);
            barrier.bytes -= copy.bytes;
            barrier.settle();
            bulk.erase(bulk.begin() + i);
        }
    }
};
constexpr int STACK = 1 << 16;
struct Fiber {
    ucontext_t context;  // to begin with; from then on `place`, which takes no call of the system
    jmp_buf place;
    bool begun = false;
    std::unique_ptr<char[]> stack{new char[STACK]};
    bool done = false;
    int cluster_turn = 0;
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

// The turn that this arrival belongs to.
inline int arrive(Meeting& meeting) {
    const int turn = meeting.turn;
    if (++meeting.arrived == meeting.needed) {
        meeting.arrived = 0;
        ++meeting.turn;
    }
    return turn;
}
inline void meet(Meeting& meeting) {
    const int turn = arrive(meeting);
    while (meeting.turn == turn) leave();
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
        for (Block& b : blocks) b.land();
    }
    for (const Block& b : blocks)
        if (!b.bulk.empty()) return false;
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

// To a block's shared memory, whose barrier counts the bytes; addresses as `mapped` makes them.
inline void send(const float* values, u32 bytes, u32 there, u32 barrier) {
    if (there >> 24 != barrier >> 24 || there % bytes) abort();
    Block& to = blocks[there >> 24];
    const u32 at = there & 0xffffff;
    if (at + bytes > to.memory.size()) abort();
    memcpy(to.memory.data() + at, values, bytes);
    Barrier& counts = to.barriers.at(barrier & 0xffffff);
    counts.bytes -= bytes;
    counts.settle();
}

}  // namespace cpu

inline float __uint_as_float(u32 bits) { return cpu::of_bits(bits); }
inline u32 __float_as_uint(float x) { return cpu::bits_of(x); }
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
inline void cluster_arrive_relaxed() { cpu::now->cluster_turn = cpu::arrive(cpu::cluster); }
inline void cluster_arrive() { cpu::now->cluster_turn = cpu::arrive(cpu::cluster); }
inline void cluster_wait() {
    while (cpu::cluster.turn == cpu::now->cluster_turn) cpu::leave();
}
inline void wait_for_previous() {}
inline void launch_next() {}
inline bool elect() { return cpu::lane() == 0; }

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
inline u32 __reduce_max_sync(u32 all, u32 x) {
    for (int step = 16; step; step /= 2) x = max(x, __shfl_xor_sync(all, x, step));
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

inline void named_sync(u32 id, u32 threads) {
    cpu::Meeting& meeting = cpu::block().named[id];
    meeting.needed = threads;
    cpu::meet(meeting);
}
inline void named_arrive(u32 id, u32 threads) {
    cpu::Meeting& meeting = cpu::block().named[id];
    meeting.needed = threads;
    cpu::arrive(meeting);
}
inline void barrier_init(u32 at, u32 arrivals) { cpu::block().barriers[at] = {int(arrivals), int(arrivals)}; }
inline void barrier_init_fence() {}
inline void barrier_expect(u32 at, u32 bytes) {
    cpu::Barrier& barrier = cpu::block().barriers.at(at);
    barrier.bytes += bytes;
    --barrier.left;
    barrier.settle();
}
inline void barrier_arrive(u32 at) { barrier_expect(at, 0); }
inline void barrier_wait(u32 at, u32 parity) {
    while (cpu::block().barriers.at(at).phase == parity) cpu::leave();
}
// Addresses of another block's shared memory have its rank in their high bits.
inline u32 mapped(u32 address, int rank) { return u32(rank) << 24 | address; }
inline void send_2(float x, float y, u32 there, u32 barrier) {
    const float values[2] = {x, y};
    cpu::send(values, sizeof values, there, barrier);
}
inline void send_4(float x, float y, float z, float w, u32 there, u32 barrier) {
    const float values[4] = {x, y, z, w};
    cpu::send(values, sizeof values, there, barrier);
}
inline void send(float x, u32 address, u32 barrier, int rank) {
    cpu::send(&x, sizeof x, mapped(address, rank), mapped(barrier, rank));
}
inline void send_4(const float (&x)[4], u32 address, u32 barrier, int rank) {
    cpu::send(x, sizeof x, mapped(address, rank), mapped(barrier, rank));
}
inline void copy_bytes(u32 target, const unsigned char* source, u32 bytes, u32 barrier) {
    if (target % 16 || bytes % 16 || u64(source) % 16) abort();
    cpu::block().bulk.push_back({target, source, bytes, barrier, rand() % 50});
}

// Values in shared memory.
template <typename T>
inline T& shared_value(u32 at, int rank = cpu::now->block.x - cpu::first) {
    auto& memory = cpu::blocks[rank].memory;
    if (at % sizeof(T) || at + sizeof(T) > memory.size()) abort();
    return *(T*)(memory.data() + at);
}
inline uint4 get_4(u32 at) { return shared_value<uint4>(at); }
inline uint2 get_words(u32 at) { return shared_value<uint2>(at); }
inline float2 get_2(u32 at) { return shared_value<float2>(at); }
inline float get(u32 at) { return shared_value<float>(at); }
inline u32 get_half(u32 at) { return shared_value<unsigned short>(at); }
inline u32 get_byte(u32 at) { return shared_value<unsigned char>(at); }
inline void put_2(u32 at, float x, float y) { shared_value<float2>(at) = {x, y}; }
inline void put(u32 at, float v) { shared_value<float>(at) = v; }
inline void put_4(u32 at, u32 x, u32 y, u32 z, u32 w) { shared_value<uint4>(at) = {x, y, z, w}; }
inline void put_to(u32 at, int rank, float v) { shared_value<float>(at, rank) = v; }

inline u32 __byte_perm(u32 a, u32 b, u32 selectors) {
    const u64 bytes = u64(b) << 32 | a;
    u32 y = 0;
    for (int i = 0; i < 4; ++i) y |= (bytes >> (selectors >> 4 * i & 7) * 8 & 255) << 8 * i;
    return y;
}
// prmt with selectors above 7: a byte's sign eight times.
inline u32 sign_bytes(u32 a, u32 b, u32 selectors) {
    u32 y = 0;
    for (int i = 0; i < 4; ++i) {
        const u32 byte = __byte_perm(a, b, selectors >> 4 * i & 7) & 255;
        y |= (selectors >> 4 * i & 8 ? (byte & 128 ? 255 : 0) : byte) << 8 * i;
    }
    return y;
}
template <typename T>
inline T __ldg(const T* at) {
    return *at;
}
inline u32 pack_bf16(float low, float high) { return pack(low, high); }
inline u32 times(u32 a, u32 b) { return pack(to_float(a) * to_float(b), to_float(a >> 16) * to_float(b >> 16)); }
inline u32 fma2(u32 a, u32 b, u32 c) {
    return pack(fmaf(to_float(a), to_float(b), to_float(c)), fmaf(to_float(a >> 16), to_float(b >> 16), to_float(c >> 16)));
}
inline float of_half(u32 bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const float x = exponent ? ldexpf(1024 + fraction, exponent - 25) : ldexpf(fraction, -24);
    return bits & 0x8000 ? -x : x;
}
inline u32 half_of(float x) {
    const _Float16 y = x;
    unsigned short bits;
    memcpy(&bits, &y, 2);
    return bits;
}
#if PRODUCTS_OF_HALVES
inline u32 operands(float low, float high) { return half_of(low) | half_of(high) << 16; }
inline u32 less_1152(u32 x) { return operands(of_half(x & 0xffff) - 1152, of_half(x >> 16) - 1152); }
#endif
inline int __float2int_rn(float x) { return lrintf(x); }
inline float of_e4m3(u32 code) {
    const int exponent = code >> 3 & 15, fraction = code & 7;
    const float x = exponent ? ldexpf(8 + fraction, exponent - 10) : ldexpf(fraction, -9);
    return code & 128 ? -x : x;
}
// The nearest, of two the even one, at most 448.
inline u32 code_e4m3(float x) {
    u32 best = 0;
    for (u32 code = 1; code < 127; ++code) {
        const float off = fabsf(of_e4m3(code) - fabsf(x)), least = fabsf(of_e4m3(best) - fabsf(x));
        if (off < least || (off == least && code % 2 == 0)) best = code;
    }
    return best | (std::signbit(x) ? 128 : 0);
}
inline u32 to_e4m3(float low, float high) { return code_e4m3(low) | code_e4m3(high) << 8; }
inline void from_e4m3(u32 codes, float& low, float& high) {
    low = of_e4m3(codes & 255);
    high = of_e4m3(codes >> 8 & 255);
}
inline u32 halves_of_e4m3(u32 two) { return half_of(of_e4m3(two & 255)) | half_of(of_e4m3(two >> 8 & 255)) << 16; }
inline float exp_fast(float x) { return expf(x); }
#define __expf exp_fast
inline float __fdividef(float x, float y) { return x / y; }

inline void prefetch(const void*) {}
inline void prefetch_bytes(const unsigned char*, int) {}

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

inline u32 transposed(u32 x) {
    cpu::warp().shared[cpu::lane()][0] = x;
    __syncwarp();
    u32 y = 0;
    for (int i = 0; i < 2; ++i) {
        const int row = cpu::lane() % 4 * 2 + i, column = cpu::lane() / 4;
        y |= (u32(cpu::warp().shared[row * 4 + column / 2][0]) >> 16 * (column % 2) & 0xffff) << 16 * i;
    }
    __syncwarp();
    return y;
}

// mma.m16n8k16: d += a @ b.
inline void product(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    auto& given = cpu::warp().shared;
    for (int i = 0; i < 4; ++i) given[cpu::lane()][i] = a[i];
    given[cpu::lane()][4] = b0;
    given[cpu::lane()][5] = b1;
    __syncwarp();
    auto half = [&](int lane, int word, int k) {
        const u32 bits = given[lane][word] >> 16 * (k % 2) & 0xffff;
        return PRODUCTS_OF_HALVES ? of_half(bits) : to_float(bits);
    };
    for (int i = 0; i < 4; ++i) {
        const int row = cpu::lane() / 4 + i / 2 * 8, column = cpu::lane() % 4 * 2 + i % 2;
        for (int k = 0; k < 16; ++k)
            d[i] += half(row % 8 * 4 + k % 8 / 2, row / 8 + k / 8 * 2, k) * half(column * 4 + k % 8 / 2, 4 + k / 8, k);
    }
    __syncwarp();
}
