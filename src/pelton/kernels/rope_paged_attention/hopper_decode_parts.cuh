// Of hopper_decode.cu: what a warp makes of its keys, and how the warps of a cluster join their parts.
//
// Scores are keys times queries, not queries times keys: a product of tensor cores then has 16 keys and the 8 heads of
// a group, and none of its rows is empty.
#pragma once
#include "sinks.cuh"
#if KV_CODE
#include "hopper_decode_codes.cuh"
#define OPERAND "f16"
#else
#include "hopper_decode_elements.cuh"
#define OPERAND ELEMENT
#endif

constexpr u32 TILE_BYTES = KEYS * ROW_BYTES, STAGE_BYTES = 2 * TILE_BYTES;
constexpr int EIGHTS = (GROUP + 7) / 8, PAIRS = (GROUP + 1) / 2;  // of heads
constexpr int SIXTEENS = KEYS / 16;                               // of a tile's keys
constexpr int OWN = D / CLUSTER;                                  // dimensions of the result that a block joins
constexpr int PARTS = CLUSTER * WARPS;
constexpr float LOG2_E = 1.4426950408889634f;
static_assert(OWN >= 8, "eight rows of a product go to one block");

// Shared memory: the warps' tiles; from each warp of the cluster its part of this block's dimensions, by pairs of
// heads, then its largest score and its sum of each head; the new key's scores and the new value; the barrier.
constexpr u32 PART_BYTES = 8 * PAIRS * OWN + 32;  // four parts' are read at once, from all banks
constexpr u32 PARTS_AT = WARPS * STAGES * STAGE_BYTES, SUMS_AT = PARTS_AT + PARTS * PART_BYTES;
constexpr u32 NEW_AT = SUMS_AT + PARTS * 16 * PAIRS, VALUE_AT = NEW_AT + 64, BARRIER_AT = VALUE_AT + 4 * D;
constexpr u32 SENT_BYTES = PARTS * (8 * PAIRS * OWN + 16 * PAIRS);  // to each block
// At the barrier arrive the lanes of the new key's warp and the thread that says how many bytes are sent to the block,
// or, of a block that is alone, the lanes of all warps.
constexpr u32 ARRIVALS = 32 + (CLUSTER == 1 ? 32 * WARPS : 1);

// Of a matrix of 8 x 8, whose rows are held by four lanes each.
DEVICE u32 transposed(u32 x) {
    u32 y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

// d (16 x 8) += a (16 x 16) @ b (16 x 8).
DEVICE void product(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." OPERAND "." OPERAND ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
                 "{%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The address of the same place in another block of the cluster.
DEVICE u32 mapped(u32 address, int rank) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

// Into the shared memory of a block, whose barrier counts the bytes.
DEVICE void send_2(float x, float y, u32 there, u32 barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(there),
                 "f"(x), "f"(y), "r"(barrier)
                 : "memory");
}
DEVICE void send_4(float x, float y, float z, float w, u32 there, u32 barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                     there),
                 "f"(x), "f"(y), "f"(z), "f"(w), "r"(barrier)
                 : "memory");
}

// To the same address of block `rank`, known there when its barrier's phase is over. A block that is alone just stores:
// what it sent to itself compute-sanitizer would take for an access beyond the cluster.
DEVICE void hand_2(float x, float y, u32 address, u32 barrier, int rank) {
    if (CLUSTER == 1) put_2(address, x, y);
    else send_2(x, y, mapped(address, rank), mapped(barrier, rank));
}
DEVICE void hand_4(float x, float y, float z, float w, u32 address, u32 barrier, int rank) {
    if (CLUSTER == 1) put_4(address, __float_as_uint(x), __float_as_uint(y), __float_as_uint(z), __float_as_uint(w));
    else send_4(x, y, z, w, mapped(address, rank), mapped(barrier, rank));
}

// In units of log2(e), so that exp2 of it costs no multiplication of its own.
DEVICE float scaled(float score, float scale, float softcap) {
    if (!SOFTCAP) return score * (scale * LOG2_E);
    // softcap tanh(x / softcap), tanh(u) = 1 - 2 / (exp(2 u) + 1)
    return softcap * (1.0f - 2.0f / (exp2_fast(2.0f * LOG2_E * scale * score / softcap) + 1.0f)) * LOG2_E;
}

// To exp2 of scores from: a head that has seen no key yet has -inf, and -inf - -inf is NaN.
DEVICE float shift_of(float best) { return best == NEGATIVE_INFINITY ? 0.0f : best; }

// Scores of 16 keys: of this lane keys lane / 4 (elements 0 and 1) and 8 further, heads lane % 4 * 2 and the next.
// Two sums, since a product waits for the one before that adds to the same.
DEVICE void score(float (&s)[4], const u32 (&low)[SLOTS][4], const u32 (&high)[SLOTS][4], const u32 (&q)[SLOTS][4]) {
    float other[4] = {};
    s[0] = s[1] = s[2] = s[3] = 0.0f;
#pragma unroll
    for (int slot = 0; slot < SLOTS; ++slot) {
        const u32 a[4] = {low[slot][0], high[slot][0], low[slot][1], high[slot][1]};
        const u32 b[4] = {low[slot][2], high[slot][2], low[slot][3], high[slot][3]};
        product(s, a, q[slot][0], q[slot][1]);
        product(other, b, q[slot][2], q[slot][3]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) s[i] += other[i];
}

// What a warp has seen: of each eight heads this lane's two, and of the result dimensions lane / 4 of each 8.
struct Part {
    float best[EIGHTS][2], total[EIGHTS][2];
    float out[EIGHTS][D / 16][4];

    DEVICE Part() {
#pragma unroll
        for (int n = 0; n < EIGHTS; ++n) {
            best[n][0] = best[n][1] = NEGATIVE_INFINITY;
            total[n][0] = total[n][1] = 0.0f;
#pragma unroll
            for (int m = 0; m < D / 16; ++m) out[n][m][0] = out[n][m][1] = out[n][m][2] = out[n][m][3] = 0.0f;
        }
    }

    // One tile more, K at `tile`, V behind it; keys `from` to `to` of it count.
    DEVICE void attend(const u32 (&q)[EIGHTS][SLOTS][4], u32 tile, int from, int to, float scale, float softcap) {
        const int row = threadIdx.x % 32 / 4;
        float s[EIGHTS][SIXTEENS][4];
#pragma unroll
        for (int block = 0; block < SIXTEENS; ++block) {
            u32 low[SLOTS][4], high[SLOTS][4];
            load_key(low, tile, 16 * block + row);
            load_key(high, tile, 16 * block + row + 8);
#pragma unroll
            for (int n = 0; n < EIGHTS; ++n) {
                score(s[n][block], low, high, q[n]);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int key = 16 * block + row + i / 2 * 8;
                    float& x = s[n][block][i];
                    x = key < from || key >= to ? NEGATIVE_INFINITY : scaled(x, scale, softcap);
                }
            }
        }
        u32 p[EIGHTS][SIXTEENS][2];
#pragma unroll
        for (int n = 0; n < EIGHTS; ++n) {
#pragma unroll
            for (int head = 0; head < 2; ++head) {
                float now = best[n][head];
#pragma unroll
                for (int block = 0; block < SIXTEENS; ++block) now = fmaxf(now, fmaxf(s[n][block][head], s[n][block][2 + head]));
#pragma unroll
                for (int step = 4; step < 32; step *= 2) now = fmaxf(now, __shfl_xor_sync(0xffffffff, now, step));
                const float shift = shift_of(now), shrink = exp2_fast(best[n][head] - shift);
                best[n][head] = now;
                total[n][head] *= shrink;
#pragma unroll
                for (int block = 0; block < SIXTEENS; ++block) {
                    float &x = s[n][block][head], &y = s[n][block][2 + head];
                    x = exp2_fast(x - shift), y = exp2_fast(y - shift);
                    total[n][head] += x + y;
                }
#pragma unroll
                for (int m = 0; m < D / 16; ++m) {
                    out[n][m][head] *= shrink;
                    out[n][m][2 + head] *= shrink;
                }
            }
#pragma unroll
            for (int block = 0; block < SIXTEENS; ++block) {
                p[n][block][0] = transposed(operands(s[n][block][0], s[n][block][1]));
                p[n][block][1] = transposed(operands(s[n][block][2], s[n][block][3]));
            }
        }
#pragma unroll
        for (int block = 0; block < SIXTEENS; ++block) {
            u32 values[D / 16][4];
            load_values(values, tile + TILE_BYTES, block);
#pragma unroll
            for (int m = 0; m < D / 16; ++m)
#pragma unroll
                for (int n = 0; n < EIGHTS; ++n) product(out[n][m], values[m], p[n][block][0], p[n][block][1]);
        }
    }

    // To each block of the cluster what it joins.
    DEVICE void send(u32 base, int part) const {
        const int lane = threadIdx.x % 32, row = lane / 4;
#pragma unroll
        for (int n = 0; n < EIGHTS; ++n) {
            float sums[2];
#pragma unroll
            for (int head = 0; head < 2; ++head) {
                sums[head] = total[n][head];
#pragma unroll
                for (int step = 4; step < 32; step *= 2) sums[head] += __shfl_xor_sync(0xffffffff, sums[head], step);
            }
            const int pair = 4 * n + lane % 4;
            if (pair >= PAIRS) continue;
            if (row < CLUSTER)
                hand_4(best[n][0], sums[0], best[n][1], sums[1], base + SUMS_AT + 16 * (part * PAIRS + pair),
                       base + BARRIER_AT, row);
#pragma unroll
            for (int eight = 0; eight < D / 8; ++eight) {
                const int rank = first_of(eight) / OWN, own = dimension(eight) % OWN;
                hand_2(out[n][eight / 2][eight % 2 * 2], out[n][eight / 2][eight % 2 * 2 + 1],
                       base + PARTS_AT + part * PART_BYTES + 8 * (pair * OWN + own), base + BARRIER_AT, rank);
            }
        }
        if (CLUSTER == 1) barrier_arrive(base + BARRIER_AT);
    }
};

// The block's dimensions of the result, of what all warps of the cluster have sent and of the new key, times
// `value_scale`; by WARPS warps. `first_to`: where in `out` the first of these dimensions of the group's first head is;
// `sinks` are the group's.
DEVICE void join(u32 base, float value_scale, float y_scale, const float* sinks, u16* out, long long first_to) {
    const float to_code = RESULT_CODE ? 1.0f / y_scale : 1.0f;
    constexpr int ITEMS = PAIRS * OWN, ALL = 32 * WARPS;
    constexpr int LANES = 4 * ITEMS <= ALL ? 4 : 2 * ITEMS <= ALL ? 2 : 1;  // that share an item's parts
    static_assert(WARPS % LANES == 0, "lanes have equally many parts");
    const int share = threadIdx.x % LANES;
    for (int first = 0; first < ITEMS; first += ALL / LANES) {
        const int item = first + threadIdx.x / LANES, at = min(item, ITEMS - 1), pair = at / OWN, own = at % OWN;
        float best[2] = {NEGATIVE_INFINITY, NEGATIVE_INFINITY}, total[2] = {}, value[2] = {};
        uint4 sums[PARTS / LANES];
#pragma unroll
        for (int i = 0; i < PARTS / LANES; ++i) {
            sums[i] = get_4(base + SUMS_AT + 16 * ((i * LANES + share) * PAIRS + pair));
            best[0] = fmaxf(best[0], __uint_as_float(sums[i].x));
            best[1] = fmaxf(best[1], __uint_as_float(sums[i].z));
        }
        const float2 scores = get_2(base + NEW_AT + 8 * pair);
        best[0] = fmaxf(best[0], scores.x);
        best[1] = fmaxf(best[1], scores.y);
#pragma unroll
        for (int step = 1; step < LANES; step *= 2)
#pragma unroll
            for (int head = 0; head < 2; ++head)
                best[head] = fmaxf(best[head], __shfl_xor_sync(0xffffffff, best[head], step));
        const float shifts[2] = {shift_of(best[0]), shift_of(best[1])};
#pragma unroll
        for (int i = 0; i < PARTS / LANES; ++i) {
            const float2 values = get_2(base + PARTS_AT + (i * LANES + share) * PART_BYTES + 8 * at);
            const float low = exp2_fast(__uint_as_float(sums[i].x) - shifts[0]);
            const float high = exp2_fast(__uint_as_float(sums[i].z) - shifts[1]);
            total[0] += low * __uint_as_float(sums[i].y), value[0] += low * values.x;
            total[1] += high * __uint_as_float(sums[i].w), value[1] += high * values.y;
        }
#pragma unroll
        for (int step = 1; step < LANES; step *= 2)
#pragma unroll
            for (int head = 0; head < 2; ++head) {
                total[head] += __shfl_xor_sync(0xffffffff, total[head], step);
                value[head] += __shfl_xor_sync(0xffffffff, value[head], step);
            }
        const float newest = get(base + VALUE_AT + 4 * (blockIdx.x * OWN + own));
#pragma unroll
        for (int head = 0; head < 2; ++head) {
            const float weight = exp2_fast((head ? scores.y : scores.x) - shifts[head]);
            total[head] += weight;
            value[head] += weight * newest;
            if (share != head % LANES || item >= ITEMS || 2 * pair + head >= GROUP) continue;
            const float sum = with_sink(total[head], sinks + 2 * pair + head, best[head]);
            const float y = sum > 0.0f ? __fdividef(value[head], sum) * value_scale : 0.0f;
            const long long to = first_to + (2 * pair + head) * D + own;
            // Rounded to an element first, as another kernel would read it.
            if (RESULT_CODE) reinterpret_cast<u8*>(out)[to] = to_codes<RESULT_CODE>(to_float(to_element(y)) * to_code, 0.0f);
            else out[to] = to_element(y);
        }
    }
}
