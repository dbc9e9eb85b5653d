// The x16 layout's bytes (kernels/layouts.py describes them), as compile-time facts of each type.
#pragma once
#include <stdint.h>

#include "kernel_util.h"

namespace {

constexpr int kPanelRows = 16;

// A type's quants are unsigned bytes u below 2^kBits once unpacked (kBits 8: signed bytes), with kHalves scales
// per 32 columns, and new ones every kBlock columns (0: none in a row). A value is d * (u - kZero), and plus m when
// kMin.
struct Q4_0 {
  static constexpr int kBits = 4, kZero = 8, kHalves = 1, kBlock = 32, kScaleBytes = 32, kQuantBytes = 256;
  static constexpr bool kMin = false;
};
struct Q4_1 {
  static constexpr int kBits = 4, kZero = 0, kHalves = 1, kBlock = 32, kScaleBytes = 64, kQuantBytes = 256;
  static constexpr bool kMin = true;
};
struct Q5_0 {
  static constexpr int kBits = 5, kZero = 16, kHalves = 1, kBlock = 32, kScaleBytes = 32, kQuantBytes = 320;
  static constexpr bool kMin = false;
};
struct Q8_0 {
  static constexpr int kBits = 8, kZero = 0, kHalves = 1, kBlock = 32, kScaleBytes = 32, kQuantBytes = 512;
  static constexpr bool kMin = false;
};
struct Q4_K {
  static constexpr int kBits = 4, kZero = 0, kHalves = 1, kBlock = 256, kScaleBytes = 320, kQuantBytes = 256;
  static constexpr bool kMin = true;
};
struct Q6_K {
  static constexpr int kBits = 6, kZero = 32, kHalves = 2, kBlock = 256, kScaleBytes = 288, kQuantBytes = 384;
  static constexpr bool kMin = false;
};
// Groups of kBlock columns with a zero point each: m = -d z. Codes of 8 bits and their zero points lie 128 lower,
// as signed bytes.
template <int Group>
struct IntGroup4 {
  static constexpr int kBits = 4, kZero = 0, kHalves = 1, kBlock = Group, kScaleBytes = 48, kQuantBytes = 256;
  static constexpr bool kMin = true;
};
template <int Group>
struct IntGroup8 {
  static constexpr int kBits = 8, kZero = 0, kHalves = 1, kBlock = Group, kScaleBytes = 80, kQuantBytes = 512;
  static constexpr bool kMin = true;
};
using Int4G32 = IntGroup4<32>;
using Int4G64 = IntGroup4<64>;
using Int4G128 = IntGroup4<128>;
using Int8G32 = IntGroup8<32>;
using Int8G64 = IntGroup8<64>;
using Int8G128 = IntGroup8<128>;
// One scale a row.
struct Int8Row {
  static constexpr int kBits = 8, kZero = 0, kHalves = 1, kBlock = 0, kScaleBytes = 64, kQuantBytes = 512;
  static constexpr bool kMin = false;
};

// Where the scales of block b of 32 columns are.
template <class Q>
inline int64_t scale_offset(int64_t b) {
  if constexpr (Q::kBlock == 0)
    return 0;
  else
    return b / (Q::kBlock / 32) * Q::kScaleBytes;
}
template <class Q>
inline int64_t scale_area(int64_t k) {
  return (Q::kBlock ? scale_offset<Q>(k / 32) + 63 : Q::kScaleBytes) / 64 * 64;
}
template <class Q>
inline int64_t panel_bytes(int64_t k) {
  return scale_area<Q>(k) + k / 32 * Q::kQuantBytes;
}

// Two int16 factors, for the sums of a block's halves, that give `factor` times the sum which accumulator `half`
// stands for.
template <class Q>
constexpr int32_t halves_times(int half, int factor) {
  const uint32_t low = (uint16_t)factor, first = Q::kHalves == 1 || half == 0 ? low : 0;
  return (int32_t)(first | (Q::kHalves == 1 || half == 1 ? low << 16 : 0));
}

}  // namespace
