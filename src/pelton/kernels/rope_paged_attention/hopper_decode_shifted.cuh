// Of hopper_decode.cu: the new key where it is stored less a vector, and one of its codes rounded to the other neighbour
// where the queries that its head meets lose less by that (`look_again` of ir/kv_codes.py, whose operations these are; a
// key's score alone is summed in another order).
//
// All of the warp's lanes have the key, in the chunks of lane % 4; each rounds the D / 32 dimensions of its share. Four
// lanes alone would take eight times as long, and at one sequence the step waits for them.
//
// Included behind hopper_decode_parts.cuh, where KV_CODE is not 0.
#pragma once

constexpr int SHARE = D / 32, IN_CHUNK = 8 / SHARE;  // dimensions of a lane, lanes of a chunk
constexpr float LARGEST = KV_CODE == 2 ? 448.0f : 127.0f;

// What is known of the KV head's keys in the dimensions of this lane's share.
struct Rounding {
    int slot, first;  // dimensions: `first` and on of the chunk in `slot`
    float shift[SHARE], along[SHARE], apart[SHARE];

    // (KV_HEADS, D), (KV_HEADS, 2 D).
    DEVICE void load(const float* k_shift, const float* k_queries, int kv_head) {
        const int part = threadIdx.x % 32 / 4;
        slot = part / IN_CHUNK, first = part % IN_CHUNK * SHARE;
        const float *shifts = k_shift + kv_head * D + at(), *queries = k_queries + kv_head * 2 * D + at();
#pragma unroll
        for (int i = 0; i < SHARE; ++i) shift[i] = shifts[i], along[i] = queries[i], apart[i] = queries[D + i];
    }
    DEVICE int at() const { return 8 * chunk_of(slot) + first; }
};

// To the next larger code.
DEVICE float step_of(float code) {
    if (KV_CODE == 1) return 1.0f;
    return __uint_as_float((__float_as_uint(fmaxf(fabsf(code), 0x1p-6f)) & 0x7f800000) - 0x1800000);
}

// Of pairs of codes, two to a word.
DEVICE void pack_codes(u32 (&words)[SHARE / 2], const float (&codes)[SHARE]) {
#pragma unroll
    for (int i = 0; i < SHARE / 2; ++i) words[i] = codes_of(codes[2 * i], codes[2 * i + 1]);
}

// A rotated key, as pairs of elements; its codes are those of each lane's share.
struct NewKey {
    u32 words[SHARE / 2];

    DEVICE NewKey(const u32 (&rotated)[SLOTS][4], float scale, const Rounding& by) {
        const float inverse = 1.0f / scale;
        u32 elements[SHARE / 2] = {};
#pragma unroll
        for (int n = 0; n < 4 * SLOTS; ++n)
            if (n / (SHARE / 2) == threadIdx.x % 32 / 4) elements[n % (SHARE / 2)] = rotated[n / 4][n % 4];
        float x[SHARE], code[SHARE], move[SHARE], turn[SHARE], score = 0.0f;
#pragma unroll
        for (int i = 0; i < SHARE; ++i)
            x[i] = divided(to_float(u16(elements[i / 2] >> i % 2 * 16)) - by.shift[i], scale, inverse);
        pack_codes(words, x);
#pragma unroll
        for (int i = 0; i < SHARE; i += 2) {
            u32 two, none;
            expand(two, none, words[i / 2]);
            code[i] = of_half(two & 0xffff), code[i + 1] = of_half(two >> 16);
        }
#pragma unroll
        for (int i = 0; i < SHARE; ++i) {
            x[i] = code[i] - fminf(fmaxf(x[i], -LARGEST), LARGEST);  // from here on the error
            score += x[i] * by.along[i];
        }
#pragma unroll
        for (int lanes = 1; lanes < 32; lanes *= 2) score += __shfl_xor_sync(0xffffffff, score, lanes);
        u32 gain[SHARE], best = 0;  // what the queries lose less, as bits, which are in order
#pragma unroll
        for (int i = 0; i < SHARE; ++i) {
            const float step = step_of(code[i]);
            move[i] = x[i] > 0.0f ? -step : x[i] < 0.0f ? step : 0.0f;
            turn[i] = __fmul_rn(move[i], by.along[i]);
            const float change = __fadd_rn(__fmul_rn(turn[i], __fadd_rn(2.0f * score, turn[i])),
                                           __fmul_rn(__fmul_rn(move[i], __fadd_rn(2.0f * x[i], move[i])), by.apart[i]));
            const bool better = change < 0.0f && fabsf(code[i] + move[i]) <= LARGEST;
            gain[i] = better ? __float_as_uint(-change) : 0;
            best = max(best, gain[i]);
        }
        best = __reduce_max_sync(0xffffffff, best);
#pragma unroll
        for (int i = 0; i < SHARE; ++i)
            if (best && gain[i] == best) code[i] += move[i];
        pack_codes(words, code);
    }

    DEVICE void store(Cached* head, const Rounding& by) const {
        if (SHARE == 4)
            *reinterpret_cast<u32*>(head + by.at()) = words[0] | words[SHARE / 2 - 1] << 16;
        else
            *reinterpret_cast<u16*>(head + by.at()) = words[0];
    }

    // The chunks of lane % 4, as operands.
    DEVICE void gather(u32 (&key)[SLOTS][4]) const {
        const u32 own = SHARE == 4 ? words[0] | words[SHARE / 2 - 1] << 16 : words[0];
        u32 codes[SLOTS][2] = {};
#pragma unroll
        for (int part = 0; part < 8; ++part) {
            const int byte = part * SHARE % 8;
            codes[part / IN_CHUNK][byte / 4] |= __shfl_sync(0xffffffff, own, 4 * part + threadIdx.x % 4) << byte % 4 * 8;
        }
#pragma unroll
        for (int slot = 0; slot < SLOTS; ++slot)
#pragma unroll
            for (int i = 0; i < 2; ++i) expand(key[slot][2 * i], key[slot][2 * i + 1], codes[slot][i]);
    }
};
