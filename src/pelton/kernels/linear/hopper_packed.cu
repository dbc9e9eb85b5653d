// Products of some dozens to hundreds of tokens with a quantised matrix in the layout mma16 (gpu_layouts.py);
// compute capability 9.0.
//
// Work is dealt out evenly ("stream-K", Osama et al., 2023): its units are (tile of rows, 128 columns), and each
// block takes an equal run of them. One warp copies codes, scales and x into a ring of STAGES units, codes before
// the kernel ahead in the stream has ended. Warp groups take 64 rows of the weight each (gated: of gate and up),
// decode codes into registers where the tensor cores read them, and multiply while they decode the next. The
// weights are scaled there too, by a sum of two bfloat16 that is exact to 16 bits: a sum of its own for every group
// would take the registers of another tile. A tile that several blocks share is summed by the last of them to
// finish, in the order of its columns.
//
// Constants: RESULTS results of INNER columns; TOKENS at most (32, 64, 128), a tile of them a blockIdx.y; GROUPS of
// warps; STAGES; BIAS, RESIDUAL (whether there is one); X_ROW, R_ROW (elements from row to row); and decode.cuh's.
#include "hopper.cuh"
#include "decode.cuh"

constexpr int UNIT = 128, ROW_BYTES = 128;
constexpr int HALVES = GATED ? 2 : 1, ROWS = GROUPS * 64, PANELS = RESULTS / 16, TILE_PANELS = GROUPS * 4;
constexpr int N_TILES = (RESULTS + ROWS - 1) / ROWS, K_TILES = INNER / UNIT, UNITS = N_TILES * K_TILES;
constexpr int VALUES = TOKENS / 2;  // of a thread in a tile
constexpr int SCALES = GROUP > 0 ? UNIT / GROUP : 0;
constexpr u32 UNIT_CODES = EIGHT ? 2048 : 1024, UNIT_AREA = SCALES * AREA;  // bytes of a panel in a unit
constexpr u32 X_BYTES = 2 * TOKENS * ROW_BYTES, CODES = HALVES * TILE_PANELS * UNIT_CODES;
constexpr u32 STAGE_BYTES = X_BYTES + CODES + HALVES * TILE_PANELS * UNIT_AREA;
constexpr u32 STAGE_SPACE = (STAGE_BYTES + 1023) / 1024 * 1024;
constexpr u32 BARRIERS_AT = STAGES * STAGE_SPACE, FLAGS_AT = BARRIERS_AT + 16 * STAGES;
static_assert(INNER % UNIT == 0 && RESULTS % 16 == 0, "whole units");
static_assert(HALVES * TILE_PANELS <= 32, "a lane for every panel");

DEVICE void copy_bulk(u32 target, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

// d (64 x n) += a (64 x 16, registers) @ b (n x 16) transposed.
DEVICE void product(float (&d)[16], const u32 (&a)[4], u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
                 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, %20, 1, 1, 1, 0;"
                 : OUT8(d, 0), OUT8(d, 8)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
DEVICE void product(float (&d)[32], const u32 (&a)[4], u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" NAMES32 "}, {%32,%33,%34,%35}, %36, 1, 1, 1, 0;"
                 : OUT32(d, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
DEVICE void product(float (&d)[64], const u32 (&a)[4], u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" NAMES64 "}, {%64,%65,%66,%67}, %68, 1, 1, 1, 0;"
                 : OUT32(d, 0), OUT32(d, 32)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

DEVICE uint4 load_shared(u32 at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
    return v;
}

struct Shared {
    u32 base;
    DEVICE u32 full(u32 stage) const { return base + BARRIERS_AT + 16 * stage; }
    DEVICE u32 empty(u32 stage) const { return full(stage) + 8; }
    DEVICE u32 x(u32 stage) const { return base + stage * STAGE_SPACE; }
    DEVICE u32 codes(u32 stage) const { return x(stage) + X_BYTES; }
    DEVICE u32 areas(u32 stage) const { return codes(stage) + CODES; }
};

// The place in a ring.
struct Ring {
    u32 stage = 0, parity = 0;
    DEVICE void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

DEVICE int first_unit(int block) { return int((long long)block * UNITS / gridDim.x); }

// By one warp: a lane for every panel of the tile.
DEVICE void copy(const Shared& shared, const u8* weight, const TensorMap* x, int first, int last) {
    const int lane = threadIdx.x % 32;
    auto copy_codes = [&](u32 stage, int unit) {
        if (lane == 0) barrier_expect(shared.full(stage), STAGE_BYTES);
        __syncwarp();
        if (lane >= HALVES * TILE_PANELS) return;
        const int index = min(unit / K_TILES * TILE_PANELS + lane % TILE_PANELS, PANELS - 1);
        const u8* panel = weight + (index + lane / TILE_PANELS * PANELS) * PANEL_BYTES;
        const int k = unit % K_TILES;
        copy_bulk(shared.codes(stage) + lane * UNIT_CODES, panel + k * UNIT_CODES, UNIT_CODES, shared.full(stage));
        if (SCALES)
            copy_bulk(shared.areas(stage) + lane * UNIT_AREA, panel + CODE_BYTES + k * UNIT_AREA, UNIT_AREA,
                      shared.full(stage));
    };
    auto copy_x = [&](u32 stage, int unit) {
        if (lane != 0) return;
        const int column = unit % K_TILES * UNIT;
        copy_2d(shared.x(stage), x, shared.full(stage), column, blockIdx.y * TOKENS);
        copy_2d(shared.x(stage) + TOKENS * ROW_BYTES, x, shared.full(stage), column + 64, blockIdx.y * TOKENS);
    };
    const int ahead = min(STAGES, last - first);
    for (int i = 0; i < ahead; ++i) copy_codes(i, first + i);
    wait_for_previous();
    for (int i = 0; i < ahead; ++i) copy_x(i, first + i);
    Ring ring;
    for (int unit = first + ahead; unit < last; ++unit) {
        barrier_wait(shared.empty(ring.stage), ring.parity);
        copy_codes(ring.stage, unit);
        copy_x(ring.stage, unit);
        ring.next();
    }
}

// Of a tile's sums, row scales, bias, activation and residual, and the store. Of this thread: rows lane / 4 and
// lane / 4 + 8 of its warp's 16; element 4 j + 2 h + e is row h, token 8 j + 2 (lane % 4) + e.
DEVICE void finish(float (&d)[HALVES][VALUES], int tile, int tokens, const u8* weight,
                   const float* bias, const u16* residual, u16* out) {
    const int lane = threadIdx.x % 32;
    const int panel = tile * TILE_PANELS + threadIdx.x / 32;
    if (panel >= PANELS) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int row = lane / 4 + 8 * h, n = panel * 16 + row;
        float scale[HALVES], add[HALVES];
#pragma unroll
        for (int i = 0; i < HALVES; ++i) {
            const u8* area = weight + (panel + i * PANELS) * PANEL_BYTES + CODE_BYTES;
            scale[i] = GROUP == 0 ? __ldg((const float*)area + row) : 1.0f;
            add[i] = BIAS ? bias[i * RESULTS + n] : 0.0f;
        }
#pragma unroll
        for (int j = 0; j < TOKENS / 8; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int m = blockIdx.y * TOKENS + 8 * j + 2 * (lane % 4) + e;
                if (m >= tokens) continue;
                float v = d[0][4 * j + 2 * h + e] * scale[0] + add[0];
                // Rounded as the product's own result would be.
                if (GATED)
                    v = activate(rounded(v)) *
                        rounded(d[HALVES - 1][4 * j + 2 * h + e] * scale[HALVES - 1] + add[HALVES - 1]);
                if (RESIDUAL) v += low_half(residual[(long long)m * R_ROW + n]);
                out[(long long)m * RESULTS + n] = u16(pack_bf16(v, 0.0f));
            }
    }
}

DEVICE void compute(const Shared& shared, int first, int last, int tokens, const u8* weight,
                    const float* bias, const u16* residual, u16* out, float* partial, u32* counters) {
    const int group = threadIdx.x / 128, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 flag = shared.base + FLAGS_AT + 4 * group;
    float d[HALVES][VALUES];
#pragma unroll
    for (int h = 0; h < HALVES; ++h)
#pragma unroll
        for (int i = 0; i < VALUES; ++i) d[h][i] = 0.0f;
    Ring ring;
    for (int unit = first; unit < last; ++unit) {
        barrier_wait(shared.full(ring.stage), ring.parity);
        const u64 x = matrix(shared.x(ring.stage), 8 * ROW_BYTES, 16);
        const u32 codes_at = shared.codes(ring.stage) + warp * UNIT_CODES + lane * 16;
        const u32 areas_at = shared.areas(ring.stage) + warp * UNIT_AREA;
        u32 a[2][HALVES][2][4];
        uint4 codes[HALVES];
        u32 less[HALVES][2], high[HALVES][2], low[HALVES][2];
#pragma unroll
        for (int quarter = 0; quarter < 4; ++quarter) {
            constexpr int SPAN = GROUP > 0 && GROUP < UNIT ? GROUP / 32 : 4;  // quarters of a scale
            // The registers of two quarters ago have been read.
            if (quarter > 1) product_wait<1>();
#pragma unroll
            for (int h = 0; h < HALVES; ++h) {
                if (EIGHT || quarter % 2 == 0)
                    codes[h] = load_shared(codes_at + h * (TILE_PANELS * UNIT_CODES) + (EIGHT ? quarter : quarter / 2) * 512);
                if (GROUP > 0 && quarter % SPAN == 0) {
                    const u32 area = areas_at + h * (TILE_PANELS * UNIT_AREA) + quarter / SPAN * AREA;
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        const u32 row = lane / 4 + 8 * r;
                        u32 stored, zero = 0;
                        if (HALF_SCALES)
                            asm volatile("ld.shared.u16 %0, [%1];" : "=r"(stored) : "r"(area + 2 * row));
                        else
                            asm volatile("ld.shared.u32 %0, [%1];" : "=r"(stored) : "r"(area + 4 * row));
                        if (ZERO) asm volatile("ld.shared.u8 %0, [%1];" : "=r"(zero) : "r"(area + 16 * SCALE_BYTES + row));
                        const float scale = scale_of(stored), top = rounded(scale);
                        high[h][r] = pack_bf16(top, top);
                        low[h][r] = pack_bf16(scale - top, scale - top);
                        less[h][r] = less_of(zero);
                    }
                }
                const u32 nibble = EIGHT ? 0 : quarter % 2;
                u32(&now)[2][4] = a[quarter % 2][h];
                decode(codes[h].x, nibble, less[h], now[0][0], now[0][1]);
                decode(codes[h].y, nibble, less[h], now[0][2], now[0][3]);
                decode(codes[h].z, nibble, less[h], now[1][0], now[1][1]);
                decode(codes[h].w, nibble, less[h], now[1][2], now[1][3]);
                if (GROUP > 0)
#pragma unroll
                    for (int s = 0; s < 2; ++s)
#pragma unroll
                        for (int i = 0; i < 4; ++i)
                            now[s][i] = fma2(now[s][i], high[h][i % 2], fma2(now[s][i], low[h][i % 2], MINUS_ZERO));
            }
            product_fence();
#pragma unroll
            for (int s = 0; s < 2; ++s) {
                const int step = quarter * 2 + s;
                const u64 b = x + (step / 4 * (TOKENS * ROW_BYTES) >> 4) + step % 4 * 2;
#pragma unroll
                for (int h = 0; h < HALVES; ++h) product(d[h], a[quarter % 2][h][s], b);
            }
            product_commit();
        }
        // No product may be under way where threads part.
        product_wait<0>();
#pragma unroll
        for (int h = 0; h < HALVES; ++h) pin(d[h]);
        if (lane == 0) barrier_arrive(shared.empty(ring.stage));
        ring.next();

        const int tile = unit / K_TILES, tile_begin = tile * K_TILES, tile_end = tile_begin + K_TILES;
        if (unit + 1 < tile_end && unit + 1 < last) continue;
        bool whole = first <= tile_begin && last >= tile_end;
        if (!whole) {
            // The blocks whose runs meet this tile; of two such tiles of a block, the second has slot 1.
            const int low_block = int(((long long)(tile_begin + 1) * gridDim.x - 1) / UNITS);
            const int high_block = int(((long long)tile_end * gridDim.x - 1) / UNITS);
            constexpr int SIZE = HALVES * VALUES * 128;
            auto part = [&](int block) {
                const long long slot = (long long)blockIdx.y * 2 * gridDim.x + 2 * block + (tile_begin > first_unit(block));
                return partial + (slot * GROUPS + group) * SIZE + threadIdx.x % 128;
            };
            float* own = part(blockIdx.x);
#pragma unroll
            for (int i = 0; i < HALVES * VALUES; ++i) __stcg(own + i * 128, d[i / VALUES][i % VALUES]);
            __threadfence();
            named_sync(1 + group, 128);
            if (threadIdx.x % 128 == 0) {
                u32* counter = counters + (blockIdx.y * N_TILES + tile) * GROUPS + group;
                const u32 is_last = atomicAdd(counter, 1u) == u32(high_block - low_block);
                if (is_last) atomicExch(counter, 0u);
                __threadfence();
                asm volatile("st.shared.u32 [%0], %1;" ::"r"(flag), "r"(is_last) : "memory");
            }
            named_sync(1 + group, 128);
            u32 is_last;
            asm volatile("ld.shared.u32 %0, [%1];" : "=r"(is_last) : "r"(flag) : "memory");
            if (is_last) {
                for (int block = low_block; block <= high_block; ++block) {
                    const float* from = part(block);
#pragma unroll
                    for (int i = 0; i < HALVES * VALUES; ++i) {
                        const float v = __ldcg(from + i * 128);
                        d[i / VALUES][i % VALUES] = block == low_block ? v : d[i / VALUES][i % VALUES] + v;
                    }
                }
                whole = true;
            }
        }
        if (whole) finish(d, tile, tokens, weight, bias, residual, out);
#pragma unroll
        for (int h = 0; h < HALVES; ++h)
#pragma unroll
            for (int i = 0; i < VALUES; ++i) d[h][i] = 0.0f;
    }
}

// Where sums need more registers than an even share, the copying warp group gives some up.
constexpr bool UNEVEN = HALVES * VALUES > 64;
static_assert(!UNEVEN || GROUPS == 2, "registers for two");

extern "C" __global__ void __launch_bounds__(GROUPS * 128 + (UNEVEN ? 128 : 32), 1)
    packed(const u8* weight, const __grid_constant__ TensorMap x_map, const float* bias,
           const u16* residual, u16* out, float* partial, u32* counters, int tokens) {
    extern __shared__ unsigned char memory[];
    const Shared shared{(shared_address(memory) + 1023) / 1024 * 1024};
    if (threadIdx.x == 0) {
        prefetch_map(&x_map);
        for (u32 i = 0; i < STAGES; ++i) {
            barrier_init(shared.full(i), 1);
            barrier_init(shared.empty(i), GROUPS * 4);
        }
        barrier_init_fence();
    }
    __syncthreads();
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    const int first = first_unit(blockIdx.x), last = first_unit(blockIdx.x + 1);
    if (threadIdx.x >= GROUPS * 128) {
        if (UNEVEN) registers_less<24>();
        if (threadIdx.x < GROUPS * 128 + 32) copy(shared, weight, &x_map, first, last);
    } else {
        if (UNEVEN) registers_more<240>();
        wait_for_previous();
        compute(shared, first, last, tokens, weight, bias, residual, out, partial, counters);
    }
}
