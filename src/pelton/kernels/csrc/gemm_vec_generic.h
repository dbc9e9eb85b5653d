// Registers of 16 rows in plain C++: correct anywhere, fast nowhere.
#pragma once
#include <stdint.h>
#include <string.h>

#include "gemm_format.h"

#define PELTON_INLINE inline

namespace {

constexpr int kLanes = 16;
// Tokens of a tile with int8 and with float32 activations: what the registers hold.
constexpr int kTileTokens = 1, kTileTokensF32 = 1;
struct I {  // 16 rows x 4 bytes, or 16 x int32
  union {
    uint8_t u8[64];
    int8_t i8[64];
    uint32_t u32[16];
    int32_t i32[16];
  };
};
struct F {
  float v[16];
};

#define PELTON_LANES(type, expression)                     \
  type out_;                                               \
  for (int i = 0; i < 16; i++) {                           \
    expression;                                            \
  }                                                        \
  return out_

PELTON_INLINE I load(const void* p) {
  I out;
  memcpy(&out, p, sizeof out);
  return out;
}
PELTON_INLINE void store(void* p, I v) { memcpy(p, &v, sizeof v); }
PELTON_INLINE F load_f32(const float* p) {
  F out;
  memcpy(&out, p, sizeof out);
  return out;
}
PELTON_INLINE void store_f32(float* p, F v) { memcpy(p, &v, sizeof v); }
PELTON_INLINE F load_f16(const void* p) { PELTON_LANES(F, out_.v[i] = pelton_f16_to_f32(((const uint16_t*)p)[i])); }
PELTON_INLINE F load_bf16(const void* p) {
  PELTON_LANES(F, out_.v[i] = pelton_bf16_to_f32(((const uint16_t*)p)[i]));
}
PELTON_INLINE F load_u8(const void* p) { PELTON_LANES(F, out_.v[i] = ((const uint8_t*)p)[i]); }
PELTON_INLINE F load_i8(const void* p) { PELTON_LANES(F, out_.v[i] = ((const int8_t*)p)[i]); }
PELTON_INLINE F load_f32(const float* p, int64_t n) { PELTON_LANES(F, out_.v[i] = i < n ? p[i] : 0); }
PELTON_INLINE void store_f32(float* p, F v, int64_t n) {
  for (int i = 0; i < 16 && i < n; i++) p[i] = v.v[i];
}

PELTON_INLINE I spread4(const void* p) { PELTON_LANES(I, memcpy(&out_.u32[i], p, 4)); }
PELTON_INLINE F constant(float x) { PELTON_LANES(F, out_.v[i] = x); }
PELTON_INLINE F spread(const float* p) { return constant(*p); }
PELTON_INLINE F zero() { return constant(0); }
PELTON_INLINE F add(F a, F b) { PELTON_LANES(F, out_.v[i] = a.v[i] + b.v[i]); }
PELTON_INLINE F mul(F a, F b) { PELTON_LANES(F, out_.v[i] = a.v[i] * b.v[i]); }
PELTON_INLINE F fma(F a, F b, F c) { PELTON_LANES(F, out_.v[i] = a.v[i] * b.v[i] + c.v[i]); }
PELTON_INLINE F to_float(I a) { PELTON_LANES(F, out_.v[i] = (float)a.i32[i]); }
PELTON_INLINE I add(I a, I b) { PELTON_LANES(I, out_.i32[i] = a.i32[i] + b.i32[i]); }

PELTON_INLINE I low_nibbles(I a) { PELTON_LANES(I, out_.u32[i] = a.u32[i] & 0x0f0f0f0fu); }
PELTON_INLINE I high_nibbles(I a) { PELTON_LANES(I, out_.u32[i] = a.u32[i] >> 4 & 0x0f0f0f0fu); }
// Bits [from, from + width) of every byte of a, moved to bit `to`.
PELTON_INLINE I move_bits(I a, int from, int width, int to) {
  const uint32_t mask = (uint32_t)(((1 << width) - 1) << to) * 0x01010101u;
  PELTON_LANES(I, out_.u32[i] = (from < to ? a.u32[i] << (to - from) : a.u32[i] >> (from - to)) & mask);
}
PELTON_INLINE I bit_or(I a, I b) { PELTON_LANES(I, out_.u32[i] = a.u32[i] | b.u32[i]); }
// Column j of each 4-byte group as float, from unsigned or signed bytes.
PELTON_INLINE F column_u8(I a, int j) { PELTON_LANES(F, out_.v[i] = a.u8[4 * i + j]); }
PELTON_INLINE F column_i8(I a, int j) { PELTON_LANES(F, out_.v[i] = a.i8[4 * i + j]); }

// Sums of products of a type's quants with int8 activations x; `halves` points to x's sums over the block's halves.
template <class Q>
struct Dot {
  I sum32;
  PELTON_INLINE void start(const uint8_t* halves, int half) {
    int16_t sums[2];
    memcpy(sums, halves, sizeof sums);
    const int sum = Q::kHalves == 2 ? sums[half] : sums[0] + sums[1];
    for (int i = 0; i < 16; i++) sum32.i32[i] = -Q::kZero * sum;
  }
  PELTON_INLINE void add(int, I w, I x) {
    for (int i = 0; i < 64; i++) sum32.i32[i / 4] += (Q::kBits == 8 ? w.i8[i] : w.u8[i]) * x.i8[i];
  }
  PELTON_INLINE I sum(const uint8_t*, int) const { return sum32; }
};

}  // namespace
