// Products of a few tokens with a quantised matrix in the layout mma16 (gpu_layouts.py), bound by the memory that
// holds the matrix; compute capability 9.0.
//
// A block takes every gridDim.x-th 16 rows of the weight (gated: of gate and up), BATCH at a time; its warps share
// the columns. A lane's 16-byte loads are what it needs for its products, decoded in registers; a unit is 16 rows
// and 128 columns, and a warp has BATCH units of the columns to come in registers while it multiplies. It
// begins to load before the kernel ahead in the stream has ended, since weights are no kernel's result. The sums of
// the warps meet in shared memory, so nothing is shared between blocks, and a row's sum has one order always.
//
// Constants: RESULTS results of INNER columns; TOKENS at most (8 or 16); WARPS, BATCH (16 rows, gated: of each half);
// BLOCKS of a multiprocessor; X_UNITS (units of x that a warp has in shared memory: all of its own, or one at a time);
// NORM (x passes an RMS norm first); BIAS, RESIDUAL (whether there is one); X_ROW, R_ROW (elements from row to row);
// and decode.cuh's.
#include "decode.cuh"

constexpr int UNIT = 128;
constexpr int LOADS = EIGHT ? 4 : 2;  // of 16 bytes, of a lane in a unit
constexpr int SCALES = GROUP > 0 ? UNIT / GROUP : 0;  // sets of them in a unit
constexpr int UNITS = INNER / UNIT, PANELS = RESULTS / 16;
constexpr int HALVES = GATED ? 2 : 1, ROWS16 = BATCH * HALVES;  // 16-row panels of a batch
constexpr int TILES = TOKENS / 8;
constexpr int THREADS = WARPS * 32;
constexpr bool RESIDENT = X_UNITS * WARPS >= UNITS;
static_assert(INNER % UNIT == 0 && RESULTS % 16 == 0 && TOKENS % 8 == 0, "whole units");

DEVICE void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

DEVICE uint4 load_codes(const u8* at) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at));
    return v;
}

// What a lane needs of 16 rows and 128 columns: codes and, of rows g and g + 8, scales and zero points as stored.
struct Unit {
    uint4 codes[LOADS];
    u32 scales[SCALES ? SCALES : 1][2];
    u32 zeros[SCALES ? SCALES : 1][2];

    DEVICE void load(const u8* panel, int unit, int lane) {
#pragma unroll
        for (int i = 0; i < LOADS; ++i) codes[i] = load_codes(panel + (unit * LOADS + i) * 512 + lane * 16);
#pragma unroll
        for (int s = 0; s < SCALES; ++s) {
            const u8* area = panel + CODE_BYTES + (unit * SCALES + s) * AREA;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int row = lane / 4 + 8 * h;
                scales[s][h] = HALF_SCALES ? __ldg((const u16*)area + row) : __ldg((const u32*)area + row);
                if (ZERO) zeros[s][h] = __ldg(area + 16 * SCALE_BYTES + row);
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    packed(const u8* __restrict__ weight, const u16* __restrict__ x, const float* __restrict__ bias,
           const u16* __restrict__ residual, const float* __restrict__ norm, u16* __restrict__ out, int tokens, float eps) {
    // Sums of [warp][16-row panel][row][token]; of a norm, the tokens' sums of squares by warp; x of each warp.
    extern __shared__ __align__(16) float sums[];
    float* squares = sums + WARPS * ROWS16 * 16 * TOKENS;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const int first = warp * UNITS / WARPS, last = (warp + 1) * UNITS / WARPS;
    const int mine = (PANELS - int(blockIdx.x) + int(gridDim.x) - 1) / int(gridDim.x);  // panels of this block
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");

    // Panel i of batch b; clamped where the batch is not full: its sums are dropped.
    auto panel = [&](int b, int i) {
        const int index = min(b * BATCH + i / HALVES, mine - 1);
        const int p = int(blockIdx.x) + index * int(gridDim.x) + (i % HALVES) * PANELS;
        return weight + p * PANEL_BYTES;
    };
    Unit units[ROWS16];
#pragma unroll
    for (int i = 0; i < ROWS16; ++i)
        if (first < last) units[i].load(panel(0, i), first, lane);
    asm volatile("griddepcontrol.wait;" ::: "memory");

    const int batches = (mine + BATCH - 1) / BATCH;
    // x of the warp's own columns: rows of 256 bytes a unit, whose 16-byte chunks are placed so that eight rows'
    // are read from different banks. Resident, it is there for all batches; else a unit at a time.
    const u32 x_at = u32(__cvta_generic_to_shared(squares + WARPS * TOKENS)) + warp * (X_UNITS * TOKENS * 256);
    float square[TOKENS / 2];
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i) square[i] = 0.0f;
    auto load_x = [&](int unit, int slot, bool counts) {
        const int chunk = lane % 16;
        uint4 w[TOKENS / 2];
#pragma unroll
        for (int i = 0; i < TOKENS / 2; ++i) {
            const int row = 2 * i + lane / 16;
            w[i] = make_uint4(0, 0, 0, 0);
            if (row < tokens) w[i] = *(const uint4*)(x + (long long)row * X_ROW + unit * UNIT + chunk * 8);
        }
        if (NORM) {
            const float4 low = __ldg((const float4*)(norm + unit * UNIT) + 2 * chunk);
            const float4 high = __ldg((const float4*)(norm + unit * UNIT) + 2 * chunk + 1);
#pragma unroll
            for (int i = 0; i < TOKENS / 2; ++i) {
                const float v[8] = {low_half(w[i].x), high_half(w[i].x), low_half(w[i].y), high_half(w[i].y),
                                    low_half(w[i].z), high_half(w[i].z), low_half(w[i].w), high_half(w[i].w)};
#pragma unroll
                for (int j = 0; j < 8; ++j) square[i] += counts ? v[j] * v[j] : 0.0f;
                w[i] = make_uint4(pack_bf16(v[0] * low.x, v[1] * low.y), pack_bf16(v[2] * low.z, v[3] * low.w),
                                  pack_bf16(v[4] * high.x, v[5] * high.y), pack_bf16(v[6] * high.z, v[7] * high.w));
            }
        }
#pragma unroll
        for (int i = 0; i < TOKENS / 2; ++i) {
            const int row = 2 * i + lane / 16;
            asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(x_at + slot * (TOKENS * 256) + row * 256 +
                                                                          (chunk ^ row % 8) * 16),
                         "r"(w[i].x), "r"(w[i].y), "r"(w[i].z), "r"(w[i].w)
                         : "memory");
        }
    };
    if (RESIDENT) {
        for (int unit = first; unit < last; ++unit) load_x(unit, unit - first, true);
        __syncwarp();
    }
    float d[ROWS16][TILES][4];
    for (int b = 0; b < batches; ++b) {
#pragma unroll
        for (int i = 0; i < ROWS16; ++i)
#pragma unroll
            for (int t = 0; t < TILES; ++t)
#pragma unroll
                for (int j = 0; j < 4; ++j) d[i][t][j] = 0.0f;
        for (int unit = first; unit < last; ++unit) {
            if (!RESIDENT) {
                __syncwarp();
                load_x(unit, 0, b == 0);
                __syncwarp();
            }
            // x as the products' second operand: of token g columns 16 step + 8 c + 2 q and the next.
            u32 v[TILES][8][2];
#pragma unroll
            for (int t = 0; t < TILES; ++t)
#pragma unroll
                for (int quarter = 0; quarter < 4; ++quarter) {
                    const int row = t * 8 + lane % 8, chunk = quarter * 4 + lane / 8;
                    const u32 slot = x_at + (RESIDENT ? unit - first : 0) * (TOKENS * 256);
                    const u32 at = slot + row * 256 + (chunk ^ row % 8) * 16;
                    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                                 : "=r"(v[t][2 * quarter][0]), "=r"(v[t][2 * quarter][1]), "=r"(v[t][2 * quarter + 1][0]),
                                   "=r"(v[t][2 * quarter + 1][1])
                                 : "r"(at)
                                 : "memory");
                }
            const bool more = unit + 1 < last;
            const int next_unit = more ? unit + 1 : first, next_batch = more ? b : b + 1;
#pragma unroll
            for (int i = 0; i < ROWS16; ++i) {
                const Unit& now = units[i];
                float part[TILES][4];
#pragma unroll
                for (int quarter = 0; quarter < 4; ++quarter) {
                    constexpr int SPAN = GROUP > 0 && GROUP < UNIT ? GROUP / 32 : 4;  // quarters of a scale
                    const int s = GROUP > 0 ? quarter / SPAN : 0;
                    if (GROUP > 0 && quarter % SPAN == 0)
#pragma unroll
                        for (int t = 0; t < TILES; ++t) part[t][0] = part[t][1] = part[t][2] = part[t][3] = 0.0f;
                    const u32 less[2] = {less_of(now.zeros[s][0]), less_of(now.zeros[s][1])};
                    const uint4 codes = now.codes[EIGHT ? quarter : quarter / 2];
                    const u32 nibble = EIGHT ? 0 : quarter % 2;
                    u32 a[2][4];
                    decode(codes.x, nibble, less, a[0][0], a[0][1]);
                    decode(codes.y, nibble, less, a[0][2], a[0][3]);
                    decode(codes.z, nibble, less, a[1][0], a[1][1]);
                    decode(codes.w, nibble, less, a[1][2], a[1][3]);
#pragma unroll
                    for (int t = 0; t < TILES; ++t)
#pragma unroll
                        for (int step = 0; step < 2; ++step)
                            multiply(GROUP > 0 ? part[t] : d[i][t], a[step], v[t][quarter * 2 + step][0],
                                     v[t][quarter * 2 + step][1]);
                    if (GROUP > 0 && quarter % SPAN == SPAN - 1) {
                        const float upper = scale_of(now.scales[s][0]), lower = scale_of(now.scales[s][1]);
#pragma unroll
                        for (int t = 0; t < TILES; ++t) {
                            d[i][t][0] += upper * part[t][0];
                            d[i][t][1] += upper * part[t][1];
                            d[i][t][2] += lower * part[t][2];
                            d[i][t][3] += lower * part[t][3];
                        }
                    }
                }
                if (next_batch < batches) units[i].load(panel(next_batch, i), next_unit, lane);
            }
        }

        float* own = sums + warp * (ROWS16 * 16 * TOKENS);
#pragma unroll
        for (int i = 0; i < ROWS16; ++i)
#pragma unroll
            for (int t = 0; t < TILES; ++t)
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    *(float2*)(own + (i * 16 + g + 8 * h) * TOKENS + t * 8 + 2 * q) =
                        make_float2(d[i][t][2 * h], d[i][t][2 * h + 1]);
        if (NORM && b == 0) {
#pragma unroll
            for (int i = 0; i < TOKENS / 2; ++i) {
#pragma unroll
                for (int j = 8; j > 0; j /= 2) square[i] += __shfl_xor_sync(~0u, square[i], j);
                if (lane % 16 == 0) squares[warp * TOKENS + 2 * i + lane / 16] = square[i];
            }
        }
        __syncthreads();
        const int full = min(BATCH, mine - b * BATCH);
        // Neighbouring threads have neighbouring rows of a token.
        for (int index = threadIdx.x; index < full * 16 * tokens; index += THREADS) {
            const int row = index % 16, i = index / 16 % full, m = index / 16 / full;
            const int p = int(blockIdx.x) + (b * BATCH + i) * int(gridDim.x), n = p * 16 + row;
            float y[HALVES];
#pragma unroll
            for (int h = 0; h < HALVES; ++h) {
                const float* at = sums + ((i * HALVES + h) * 16 + row) * TOKENS + m;
                y[h] = 0.0f;
#pragma unroll
                for (int w = 0; w < WARPS; ++w) y[h] += at[w * (ROWS16 * 16 * TOKENS)];
                if (GROUP == 0)
                    y[h] *= __ldg((const float*)(weight + (p + h * PANELS) * PANEL_BYTES + CODE_BYTES) + row);
            }
            if (NORM) {
                float sum = 0.0f;
#pragma unroll
                for (int w = 0; w < WARPS; ++w) sum += squares[w * TOKENS + m];
                const float scale = rsqrtf(sum / INNER + eps);
#pragma unroll
                for (int h = 0; h < HALVES; ++h) y[h] *= scale;
            }
            if (BIAS)
#pragma unroll
                for (int h = 0; h < HALVES; ++h) y[h] += bias[h * RESULTS + n];
            // Rounded as the product's own result would be.
            float v = GATED ? activate(rounded(y[0])) * rounded(y[HALVES - 1]) : y[0];
            if (RESIDUAL) v += low_half(residual[(long long)m * R_ROW + n]);
            out[(long long)m * RESULTS + n] = u16(pack_bf16(v, 0.0f));
        }
        __syncthreads();
    }
}
