// Products of up to 16 tokens with a matrix of 16 bits on compute capability 9.0, bound by the memory that holds the
// matrix: hopper_rows.cuh says how. Splits take turns in the sixteenths of a part's columns.
constexpr int COLUMNS = 64;
constexpr bool ROW_SCALES = false, X_CODES = false;
constexpr int RESULT_CODE = 0;
#include "hopper_rows.cuh"

DEVICE void load_2(u32 (&r)[2], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(address)
                 : "memory");
}
// d (16 x 8) += a (16 x 16) @ b (8 x 16) transposed.
DEVICE void multiply(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." ELEMENT "." ELEMENT
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

DEVICE void copy_weights(const Shared& shared, const TensorMap* map, u32 stage, int step) {
    const int row = (blockIdx.x + step / STEPS * WORKERS) * OUT_ROWS, column = step % STEPS * BOXES * 64;
    barrier_expect(shared.full(stage), BOXES * W_BOX);
#pragma unroll
    for (int i = 0; i < BOXES; ++i) {
        const u32 target = shared.weights(stage) + i * W_BOX;
        copy_2d(target, map, shared.full(stage), column + 64 * i, row);
        if (GATED) copy_2d(target + W_BOX / 2, map, shared.full(stage), column + 64 * i, RESULTS + row);
    }
}

DEVICE void copy_x(const Shared& shared, const TensorMap* map, u32 stage, int step) {
    barrier_expect(shared.full_x(stage), BOXES * X_BOX);
#pragma unroll
    for (int i = 0; i < BOXES; ++i)
        copy_2d(shared.x(stage) + i * X_BOX, map, shared.full_x(stage), (step % STEPS * BOXES + i) * 64, 0);
}

DEVICE void compute(const Shared& shared, int tokens, float eps, const float* bias,
                    const unsigned short* residual, unsigned short* out) {
    const int lane = threadIdx.x % 32, split = threadIdx.x / 32 % SPLITS, part = threadIdx.x / 32 / SPLITS;
    // Of the eight rows by eight columns that this lane points to: rows of the weight, then columns; of x, columns,
    // then tokens.
    const int w_row = lane % 16, w_chunk = lane / 16;
    const int x_row = TOKENS == 8 ? lane % 8 : lane / 16 * 8 + lane % 8, x_chunk = lane / 8 % 2;
    float d[ROW_TILES][TOKEN_TILES][4], squares[TOKEN_TILES];
    Ring ring;
#pragma unroll
    for (int j = 0; j < TOKEN_TILES; ++j) squares[j] = 0.0f;
    Besides besides;
    for (int step = 0; step < ALL_STEPS; ++step) {
        if (step % STEPS == 0) {
            load_residual(besides, step / STEPS, tokens, residual);
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
                for (int j = 0; j < TOKEN_TILES; ++j)
#pragma unroll
                    for (int e = 0; e < 4; ++e) d[r][j][e] = 0.0f;
        }
        barrier_wait(shared.full_x(ring.stage), ring.parity);
        barrier_wait(shared.full(ring.stage), ring.parity);
#pragma unroll
        for (int s = 0; s < (4 * BOXES + SPLITS - 1) / SPLITS; ++s) {
            const int sixteenth = s * SPLITS + split, box = sixteenth / 4, chunk = sixteenth % 4 * 2;
            if (4 * BOXES % SPLITS != 0 && box >= BOXES) break;
            u32 b[TOKEN_TILES][2];
            const u32 x = shared.x(ring.stage) + box * X_BOX + x_row * ROW_BYTES + (((chunk + x_chunk) ^ (x_row % 8)) * 16);
            if constexpr (TOKENS == 8) {
                load_2(b[0], x);
            } else {
#pragma unroll
                for (int j = 0; j < TOKEN_TILES; j += 2) {
                    u32 both[4];
                    load_4(both, x + j * 8 * ROW_BYTES);
                    b[j][0] = both[0], b[j][1] = both[1], b[j + 1][0] = both[2], b[j + 1][1] = both[3];
                }
            }
            if (NORM) {
                const int column = (step % STEPS * BOXES + box) * 64 + chunk * 8 + lane % 4 * 2;
                const u32 at = shared.base + NORM_AT + column * 2;
                const u32 gains[2] = {shared_word(at), shared_word(at + 16)};
#pragma unroll
                for (int j = 0; j < TOKEN_TILES; ++j) {
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        if (step < STEPS && part == 0) {
                            const float low = low_half(b[j][h]), high = high_half(b[j][h]);
                            squares[j] += low * low + high * high;
                        }
                        b[j][h] = times(b[j][h], gains[h]);
                    }
                }
            }
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r) {
                u32 a[4];
                load_4(a, shared.weights(ring.stage) + box * W_BOX + ((part * ROW_TILES + r) * 16 + w_row) * ROW_BYTES +
                              (((chunk + w_chunk) ^ (w_row % 8)) * 16));
#pragma unroll
                for (int j = 0; j < TOKEN_TILES; ++j) multiply(d[r][j], a, b[j]);
            }
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(shared.empty(ring.stage));
        ring.next();
        if ((step + 1) % STEPS != 0) continue;

        if (TILES == 1) named_sync(1, THREADS);  // the last of the ring has been read
        leave(shared, d, squares, step < STEPS);
        named_sync(1, THREADS);
        finish(shared, step / STEPS, tokens, eps, bias, besides, out, 0.0f);
        named_sync(1, THREADS);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS + 64, 1)
    product(const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x, const float* norm,
            const float* bias, const unsigned short* residual, unsigned short* out, int tokens, float eps) {
    extern __shared__ unsigned char memory[];
    const Shared shared{(shared_address(memory) + 1023) / 1024 * 1024};
    Gains gains;
    if (threadIdx.x >= THREADS) begin(shared, &weight, &x, WARPS);
    else if (NORM) gains.load(norm);
    __syncthreads();
    if (threadIdx.x >= THREADS) {
        copy(shared, &weight, &x);
    } else {
        if (NORM) gains.put(shared);
        wait_for_previous();
        compute(shared, tokens, eps, bias, residual, out);
    }
}
