// What kernels for compute capability 9.0 are made of: barriers in shared memory, tensor copies (TMA) and
// asynchronous products of warp groups (wgmma). Needs no header of CUDA. PTX ISA, chapters 9.7.9, 9.7.13, 9.7.15.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;

// A CUtensorMap: what cuTensorMapEncodeTiled wrote, opaque here.
struct alignas(64) TensorMap {
    u64 words[16];
};

#define DEVICE __device__ __forceinline__

DEVICE u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// ---- Barriers: phases that end when all arrivals, and all bytes announced, are there ----

DEVICE void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

// Makes the barriers of this thread known to tensor copies.
DEVICE void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

DEVICE void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

DEVICE void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Until the phase of this parity is over. A new barrier counts as having ended a phase of parity 1.
DEVICE void barrier_wait(u32 barrier, u32 parity) {
    u32 done;
    do {
        asm volatile(
            "{\n.reg .pred p;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
    } while (!done);
}

// Barriers of the block by number: all `threads` meet, or are only counted.
DEVICE void named_sync(u32 id, u32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

DEVICE void named_arrive(u32 id, u32 threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// What this thread wrote to shared memory is seen by tensor copies and products from here on.
DEVICE void fence_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- Tensor copies: a box of a tensor in global memory to shared memory; outside it is zeros ----

DEVICE void copy_2d(u32 target, const TensorMap* map, u32 barrier, int x, int y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
            target),
        "l"(map), "r"(barrier), "r"(x), "r"(y)
        : "memory");
}

DEVICE void copy_3d(u32 target, const TensorMap* map, u32 barrier, int x, int y, int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::
            "r"(target),
        "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
        : "memory");
}

DEVICE void prefetch_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// ---- Products ----

// A matrix in shared memory, 128-byte swizzle: rows of 128 bytes in groups of eight (1024 bytes, aligned so).
// `group`: bytes from one group of eight rows to the next; `column`: where rows run across the result, bytes
// from its 64 columns to the next 64 (where they run along the sum: not used).
DEVICE u64 matrix(u32 address, u32 group, u32 column) {
    const u64 swizzle = 1ull << 62;
    return swizzle | u64(group >> 4) << 32 | u64(column >> 4) << 16 | u64((address & 0x3ffff) >> 4);
}

DEVICE void product_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

DEVICE void product_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int PENDING>
DEVICE void product_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Keeps the compiler from reading or moving these registers across this point.
template <int N>
DEVICE void pin(float (&values)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(values[i])::"memory");
}

template <int N>
DEVICE void pin(u32 (&values)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+r"(values[i])::"memory");
}

#ifndef HALF
#define HALF 0
#endif
#if HALF
#define ELEMENT "f16"
#else
#define ELEMENT "bf16"
#endif

#define OUT8(d, i)                                                                                           \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
        "+f"(d[i + 7])
#define OUT32(d, i) OUT8(d, i), OUT8(d, i + 8), OUT8(d, i + 16), OUT8(d, i + 24)
#define NAMES32                                                                                    \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25," \
    "%26,%27,%28,%29,%30,%31"
#define NAMES64                                                                                              \
    NAMES32                                                                                                  \
    ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57," \
    "%58,%59,%60,%61,%62,%63"

// d (64 x 128) = a (64 x 16) @ b (128 x 16) transposed, both along the sum; plus d where `add`.
DEVICE void product_nt(float (&d)[64], u64 a, u64 b, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32." ELEMENT "." ELEMENT " {" NAMES64
                 "}, %64, %65, p, 1, 1, 0, 0;\n}"
                 : OUT32(d, 0), OUT32(d, 32)
                 : "l"(a), "l"(b), "r"(add));
}

// d (64 x 128) += a (64 x 16, registers) @ b (16 x 128).
DEVICE void product_nn(float (&d)[64], const u32* a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." ELEMENT "." ELEMENT " {" NAMES64
                 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
                 : OUT32(d, 0), OUT32(d, 32)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// d (64 x 64) += a (64 x 16, registers) @ b (16 x 64).
DEVICE void product_nn(float (&d)[32], const u32* a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." ELEMENT "." ELEMENT " {" NAMES32
                 "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
                 : OUT32(d, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// ---- Arithmetic ----

DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Two floats, rounded, in one register: `low` in its low half.
DEVICE u32 pack(float low, float high) {
    u32 y;
    asm("cvt.rn." ELEMENT "x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

// Four lanes of a row have two columns of each of four groups of eight: afterwards lane i has all of group i.
DEVICE void transpose(u32 (&w)[4]) {
    const bool high = threadIdx.x & 2, odd = threadIdx.x & 1;
    u32 x = __shfl_xor_sync(~0u, high ? w[0] : w[2], 2), y = __shfl_xor_sync(~0u, high ? w[1] : w[3], 2);
    w[0] = high ? x : w[0], w[1] = high ? y : w[1], w[2] = high ? w[2] : x, w[3] = high ? w[3] : y;
    x = __shfl_xor_sync(~0u, odd ? w[0] : w[1], 1), y = __shfl_xor_sync(~0u, odd ? w[2] : w[3], 1);
    w[0] = odd ? x : w[0], w[1] = odd ? w[1] : x, w[2] = odd ? y : w[2], w[3] = odd ? w[3] : y;
}

template <int N>
DEVICE void registers_less() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

template <int N>
DEVICE void registers_more() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

// Until the kernels before this one in the stream are done, where it was launched ahead of their end.
DEVICE void wait_for_previous() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}
