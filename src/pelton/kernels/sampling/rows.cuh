// What the sampler keeps of rows of logits, how it reads and weighs them. Constant: V.
#pragma once

#ifndef DEVICE
#define DEVICE __device__ __forceinline__
#endif
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int THREADS = 256, WARPS = THREADS / 32, PIECE = 1024, PIECES = (V + PIECE - 1) / PIECE;
constexpr int EACH = (PIECES + THREADS - 1) / THREADS;  // pieces that a thread of the last block looks at
constexpr int BINS = 2048, ROOM = 4096, DIGITS = 256;
constexpr int log2_of(int n) { return n > 1 ? 1 + log2_of((n + 1) / 2) : 0; }
constexpr int INDEX_BITS = log2_of(V), LAST_INDEX = (1 << INDEX_BITS) - 1;
static_assert(INDEX_BITS < 31, "a rank has 63 bits");
constexpr int FRACTION = INDEX_BITS > 18 ? 62 - INDEX_BITS : 44;
constexpr float REACH = 24.0f;   // temperatures that the bins reach below the largest logit
constexpr float MARGIN = 5e-6f;  // of the row's sum: what float32 may lose of the bounds
constexpr float LOG2_E = 1.4426950408889634f;
constexpr u32 ALL = 0xffffffff;
#define INFINITE __int_as_float(0x7f800000)

struct Row {
    u64 above, between;  // sums of weights above bin `first`, and from behind bin `last` to before bin `kth`
    float top;
    float scale;    // bins a unit
    int at;         // the first index with the largest logit
    int state;      // what is left to do: 0 nothing, 1 choose, 2 histogram and choose
    int first, last, kth;
    int wanted;     // of the list, so many stay by top_k
    int listed;
    u32 arrived;    // blocks that are done; 0 between kernels
    int unused[2];
};
struct Piece {
    u64 mass;  // the sum of its weights that surely stay
    float top, low, sum;
    int at;
};
static_assert(sizeof(Row) == 64 && sizeof(Piece) == 24, "cuda.py has these");

struct Parameters {
    float t, inverse, p, least, u;
    int k;
    bool by_k, by_p;
};

// ---- Sums of a warp and of a block ----

template <class T>
DEVICE T sum_of_warp(T x) {
#pragma unroll
    for (int step = 16; step; step /= 2) x += __shfl_xor_sync(ALL, x, step);
    return x;
}

// The sum over the threads before this one; `total`: over all. `room`: WARPS of shared memory.
template <class T>
DEVICE T sum_before(T x, T& total, T* room) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    T running = x;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const T other = __shfl_up_sync(ALL, running, step);
        if (lane >= step) running += other;
    }
    __syncthreads();
    if (lane == 31) room[warp] = running;
    __syncthreads();
    T before = 0;
    total = 0;
    for (int i = 0; i < WARPS; ++i) {
        if (i == warp) before = total;
        total += room[i];
    }
    return before + (running - x);
}

// What other blocks have written in this kernel.
template <class T>
DEVICE T fresh(const T& x) {
    return *const_cast<const volatile T*>(&x);
}

// Whether all other blocks of the row are done; what they have written is then there.
DEVICE bool is_last(Row& row) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(&row.arrived, 1u) == gridDim.x - 1;
        if (last) row.arrived = 0;
    }
    __syncthreads();
    __threadfence();
    return last;
}

// ---- Logits and weights ----

DEVICE Parameters parameters_of(const float* temperature, const int* top_k, const float* top_p, const float* min_p,
                                const float* uniform) {
    const int n = blockIdx.y;
    Parameters x;
    x.t = temperature[n];
    if (x.t == 0.0f) return x;
    x.t = fmaxf(x.t, 1e-30f);  // what has an inverse
    x.inverse = __fdiv_rn(1.0f, x.t);
    x.k = top_k[n];
    x.p = top_p[n];
    x.least = min_p[n];
    x.u = uniform[n];
    x.by_k = x.k > 0 && x.k < V;
    x.by_p = x.p < 1.0f;
    return x;
}

// A piece of a row: logit `place(piece, j)` in x[j], -inf behind the row's end.
DEVICE int place(int piece, int j) {
    const int lane = threadIdx.x % 32;
    return piece * PIECE + (V % 4 ? j * 32 + lane : j / 4 * 128 + lane * 4 + j % 4);
}

#ifdef __CUDACC_RTC__
DEVICE float of_half(u32 bits) {
    float y;
    asm("{.reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h;}" : "=f"(y) : "r"(bits));
    return y;
}
#endif

// A row: float32 (kind 0), or what the network computes in: bfloat16 (1), float16 (2).
struct Logits {
    const void* row;
    int kind;

    DEVICE Logits(const void* logits, int kind) : kind(kind) {
        row = static_cast<const char*>(logits) + u64(blockIdx.y) * V * (kind == 0 ? 4 : 2);
    }

    DEVICE float at(int i) const {
        if (kind == 0) return static_cast<const float*>(row)[i];
        const u32 bits = static_cast<const unsigned short*>(row)[i];
        return kind == 1 ? __int_as_float(bits << 16) : of_half(bits);
    }

    // A loop for each type: what is asked in the loop is asked for every logit.
    DEVICE void load_piece(float (&x)[32], int piece) const {
        if (V % 4) {
#pragma unroll
            for (int j = 0; j < 32; ++j) x[j] = place(piece, j) < V ? at(place(piece, j)) : -INFINITE;
        } else if (kind == 0) {
            load_fours<float4>(piece, [&](int j, float4 four) {
                x[j] = four.x;
                x[j + 1] = four.y;
                x[j + 2] = four.z;
                x[j + 3] = four.w;
            }, {-INFINITE, -INFINITE, -INFINITE, -INFINITE});
        } else if (kind == 1) {
            load_fours<uint2>(piece, [&](int j, uint2 four) {
                x[j] = __int_as_float(four.x << 16);
                x[j + 1] = __int_as_float(four.x & 0xffff0000);
                x[j + 2] = __int_as_float(four.y << 16);
                x[j + 3] = __int_as_float(four.y & 0xffff0000);
            }, {0xff80ff80, 0xff80ff80});
        } else {
            load_fours<uint2>(piece, [&](int j, uint2 four) {
                x[j] = of_half(four.x & 0xffff);
                x[j + 1] = of_half(four.x >> 16);
                x[j + 2] = of_half(four.y & 0xffff);
                x[j + 3] = of_half(four.y >> 16);
            }, {0xfc00fc00, 0xfc00fc00});
        }
    }

    // All of a lane's loads are under way before the first is looked at. `none`: four times -inf.
    template <class Four, class Take>
    DEVICE void load_fours(int piece, Take take, Four none) const {
        Four fours[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const int i = place(piece, 4 * j);
            fours[j] = none;
            if (i < V) fours[j] = static_cast<const Four*>(row)[i / 4];
        }
#pragma unroll
        for (int j = 0; j < 8; ++j) take(4 * j, fours[j]);
    }
};

#ifdef __CUDACC_RTC__
DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#endif

// Adding it leaves the nearest integer in the low bits: conversions have a sixteenth of the rate of additions.
constexpr float TO_NEAREST = 12582912.0f;

// reference.exp32(d / t): no operation may be fused but in the quotient, which is `inverse` = 1 / t's product with d,
// corrected until it is the nearest (Markstein, 1990).
DEVICE float weight(float d, float t, float inverse) {
    float x = __fmul_rn(d, inverse);
    x = __fmaf_rn(__fmaf_rn(-x, t, d), inverse, x);
    x = __fmaf_rn(__fmaf_rn(-x, t, d), inverse, x);
    const float safe = fmaxf(x, -87.0f);
    const float nearest = __fadd_rn(__fmul_rn(safe, 1.44269504f), TO_NEAREST), n = __fsub_rn(nearest, TO_NEAREST);
    const float r = __fsub_rn(__fsub_rn(safe, __fmul_rn(n, 0.693359375f)), __fmul_rn(n, -2.12194440e-4f));
    float p = 1.9875691500e-4f;
    p = __fadd_rn(__fmul_rn(p, r), 1.3981999507e-3f);
    p = __fadd_rn(__fmul_rn(p, r), 8.3334519073e-3f);
    p = __fadd_rn(__fmul_rn(p, r), 4.1665795894e-2f);
    p = __fadd_rn(__fmul_rn(p, r), 1.6666665459e-1f);
    p = __fadd_rn(__fmul_rn(p, r), 0.5f);
    const float y = __fadd_rn(__fadd_rn(__fmul_rn(p, __fmul_rn(r, r)), r), 1.0f);
    // 2^n: what TO_NEAREST itself has in the low bits is shifted out.
    const float scale = __int_as_float((u32(__float_as_int(nearest)) << 23) + 0x3f800000u);
    return x < -87.0f ? 0.0f : __fmul_rn(y, scale);
}

DEVICE u64 fixed(float w) { return static_cast<u64>(w * float(1ull << FRACTION)); }

// The bin of a logit that far below the largest: 0 for that, the nearest to `distance * scale` for others.
DEVICE int bin_of(float distance, float scale) {
    return __float_as_int(fminf(distance * scale, float(BINS - 1)) + TO_NEAREST) & (2 * BINS - 1);
}

// In the order in which tokens stay: larger logits, then smaller indices, have larger ranks.
DEVICE u64 rank_of(float x, int i) {
    const u32 bits = __float_as_int(x + 0.0f);  // -0 is 0
    return u64(bits >> 31 ? ~bits : bits ^ 0x80000000u) << INDEX_BITS | u32(LAST_INDEX - i);
}
DEVICE float logit_of(u64 rank) {
    const u32 key = rank >> INDEX_BITS;
    return __int_as_float(key >> 31 ? key ^ 0x80000000u : ~key);
}
DEVICE int index_of(u64 rank) { return LAST_INDEX - (int(rank) & LAST_INDEX); }
