// Of hopper_decode.cu: tiles of keys and values that the caches hold as elements.
#pragma once
#include "hopper_decode_heads.cuh"

typedef u16 Cached;
constexpr int KEYS = 16;

// Of keys eight lanes read four chunks of two rows, of values one chunk of eight rows: turned so that these are in all
// banks.
DEVICE u32 key_place(int row, int chunk) { return row * ROW_BYTES + ((chunk ^ row % 2 * 4) << 4); }
DEVICE u32 value_place(int row, int chunk) { return row * ROW_BYTES + ((chunk ^ row % 8) << 4); }

DEVICE void load_transposed(u32 (&x)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
}

// Numbers in the type that is multiplied, two in a word.
DEVICE u32 operands(float low, float high) { return pack(low, high); }
DEVICE u32 operands_of(u32 elements) { return elements; }

// This lane's chunks of the key in a row.
DEVICE void load_key(u32 (&words)[SLOTS][4], u32 tile, int row) {
#pragma unroll
    for (int slot = 0; slot < SLOTS; ++slot) {
        const uint4 chunk = get_4(tile + key_place(row, chunk_of(slot)));
        words[slot][0] = chunk.x, words[slot][1] = chunk.y, words[slot][2] = chunk.z, words[slot][3] = chunk.w;
    }
}

// Which dimension of the result a product's row `lane / 4` of the `eight`-th eight is; eight such of adjacent lanes, or
// of one lane, are adjacent.
DEVICE int dimension(int eight) { return 8 * eight + threadIdx.x % 32 / 4; }
DEVICE int first_of(int eight) { return 8 * eight; }

// Values of 16 keys of the tile, D / 16 operands.
DEVICE void load_values(u32 (&values)[D / 16][4], u32 tile, int block) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < D / 16; ++m)
        load_transposed(values[m], tile + value_place(16 * block + lane / 16 * 8 + lane % 8, 2 * m + lane / 8 % 2));
}

// A new head's chunk, as the cache holds it (there), as operands and as numbers.
struct NewChunk {
    u32 words[4];
    DEVICE NewChunk(const u32 (&elements)[4], float) {
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = elements[i];
    }
    DEVICE void store(Cached* there) const {
        *reinterpret_cast<uint4*>(there) = make_uint4(words[0], words[1], words[2], words[3]);
    }
    DEVICE float number(int i) const { return to_float(u16(words[i / 2] >> i % 2 * 16)); }
};
