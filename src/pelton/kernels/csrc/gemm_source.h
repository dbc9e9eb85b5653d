// Where a tile's weights come from: packed panels unpacked in registers, or a panel unpacked before.
// Included after a gemm_vec_*.h.
#pragma once
#include "gemm_format.h"

namespace {

constexpr int kRegs = kPanelRows / kLanes;  // registers that hold a panel's 16 rows
// Bytes to fetch ahead while a packed panel is read, into the next ones too: hardware prefetching stops at
// each 4 kB page. Into L2, because a fetch into L1 occupies one of its few miss buffers until memory has
// answered: that alone held a core to 12 GB/s where it can read 30. Beyond the weight's end it does nothing.
constexpr int64_t kAhead = 8192;
PELTON_INLINE void fetch_ahead(const uint8_t* p) { __builtin_prefetch(p + kAhead, 0, 2); }

// Which accumulator (`half`) a group of four columns goes to, and as its how-manieth addend. `pairs`: groups g and
// g + 4 come together, as nibbles of a byte do.
template <class Q>
constexpr int group_half(int g) {
  return Q::kHalves == 2 ? g / 4 : 0;
}
template <class Q>
constexpr int group_order(int g, bool pairs) {
  return Q::kHalves == 2 ? g % 4 : pairs ? 2 * (g % 4) + g / 4 : g;
}

// Scale d of register r's rows, and m where the type has one.
template <class Q>
PELTON_INLINE void load_scales(const uint8_t* s, int64_t b, int half, int r, F& d, F& m);

template <>
PELTON_INLINE void load_scales<Q4_0>(const uint8_t* s, int64_t b, int, int r, F& d, F&) {
  d = load_f16(s + b * 32 + r * kLanes * 2);
}
template <>
PELTON_INLINE void load_scales<Q4_1>(const uint8_t* s, int64_t b, int, int r, F& d, F& m) {
  d = load_f16(s + b * 64 + r * kLanes * 2);
  m = load_f16(s + b * 64 + 32 + r * kLanes * 2);
}
template <>
PELTON_INLINE void load_scales<Q5_0>(const uint8_t* s, int64_t b, int, int r, F& d, F&) {
  d = load_f16(s + b * 32 + r * kLanes * 2);
}
template <>
PELTON_INLINE void load_scales<Q8_0>(const uint8_t* s, int64_t b, int, int r, F& d, F&) {
  d = load_f16(s + b * 32 + r * kLanes * 2);
}
template <>
PELTON_INLINE void load_scales<Q4_K>(const uint8_t* s, int64_t b, int, int r, F& d, F& m) {
  const uint8_t* block = s + b / 8 * Q4_K::kScaleBytes;
  const uint8_t* bytes = block + 64 + b % 8 * 16 + r * kLanes;
  d = mul(load_f16(block + r * kLanes * 2), load_u8(bytes));
  m = mul(mul(load_f16(block + 32 + r * kLanes * 2), load_u8(bytes + 128)), constant(-1));
}
template <>
PELTON_INLINE void load_scales<Q6_K>(const uint8_t* s, int64_t b, int half, int r, F& d, F&) {
  const uint8_t* block = s + b / 8 * Q6_K::kScaleBytes;
  d = mul(load_f16(block + r * kLanes * 2), load_i8(block + 32 + (b % 8 * 2 + half) * 16 + r * kLanes));
}
template <class Q>
PELTON_INLINE void load_group4(const uint8_t* s, int64_t b, int r, F& d, F& m) {
  const uint8_t* group = s + scale_offset<Q>(b);
  d = load_f16(group + r * kLanes * 2);
  m = mul(mul(d, load_u8(group + 32 + r * kLanes)), constant(-1));
}
template <class Q>
PELTON_INLINE void load_group8(const uint8_t* s, int64_t b, int r, F& d, F& m) {
  const uint8_t* group = s + scale_offset<Q>(b);
  d = load_f32((const float*)group + r * kLanes);
  m = mul(mul(d, load_i8(group + 64 + r * kLanes)), constant(-1));
}
#define PELTON_GROUP_SCALES(Q, load_group)                                                       \
  template <>                                                                                    \
  PELTON_INLINE void load_scales<Q>(const uint8_t* s, int64_t b, int, int r, F& d, F& m) {       \
    load_group<Q>(s, b, r, d, m);                                                                \
  }
PELTON_GROUP_SCALES(Int4G32, load_group4)
PELTON_GROUP_SCALES(Int4G64, load_group4)
PELTON_GROUP_SCALES(Int4G128, load_group4)
PELTON_GROUP_SCALES(Int8G32, load_group8)
PELTON_GROUP_SCALES(Int8G64, load_group8)
PELTON_GROUP_SCALES(Int8G128, load_group8)
template <>
PELTON_INLINE void load_scales<Int8Row>(const uint8_t* s, int64_t, int, int r, F& d, F&) {
  d = load_f32((const float*)s + r * kLanes);
}

// One panel as the engine stores it.
template <class Q>
struct Packed {
  using Quant = Q;
  static constexpr bool kPairs = Q::kBits != 8;
  const uint8_t* scale_bytes;
  const uint8_t* quant_bytes;

  PELTON_INLINE Packed(const uint8_t* panel, int64_t k)
      : scale_bytes(panel), quant_bytes(panel + scale_area<Q>(k)) {}

  PELTON_INLINE void scales(int64_t b, int half, int r, F& d, F& m) const {
    load_scales<Q>(scale_bytes, b, half, r, d, m);
  }
  // f(g, r, w): w holds, for register r's rows, columns 4 g to 4 g + 3 of block b as bytes.
  template <class Fn>
  PELTON_INLINE void groups(int64_t b, const Fn& f) const {
    const uint8_t* q = quant_bytes + b * Q::kQuantBytes;
    for (int i = 0; i < Q::kQuantBytes; i += 64) fetch_ahead(q + i);
    fetch_ahead(scale_bytes + scale_offset<Q>(b));
    if constexpr (Q::kBits == 8) {
#pragma GCC unroll 8
      for (int g = 0; g < 8; g++)
#pragma GCC unroll 2
        for (int r = 0; r < kRegs; r++) f(g, r, load(q + g * 64 + r * kLanes * 4));
    } else {
#pragma GCC unroll 4
      for (int g = 0; g < 4; g++)
#pragma GCC unroll 2
        for (int r = 0; r < kRegs; r++) {
          const I v = load(q + g * 64 + r * kLanes * 4);
          f(g, r, high_bits(q, g, r, low_nibbles(v)));
          f(g + 4, r, high_bits(q, g + 4, r, high_nibbles(v)));
        }
    }
  }

 private:
  PELTON_INLINE static I high_bits(const uint8_t* q, int g, int r, I low) {
    if constexpr (Q::kBits == 5) {
      return bit_or(low, move_bits(load(q + 256 + r * kLanes * 4), g, 1, 4));
    } else if constexpr (Q::kBits == 6) {
      return bit_or(low, move_bits(load(q + 256 + g / 4 * 64 + r * kLanes * 4), g % 4 * 2, 2, 4));
    } else {
      return low;
    }
  }
};

// A stretch of up to kMaxBlocks blocks of a panel, unpacked to bytes and float scales: worth it when many
// tokens use it.
template <class Q>
struct Unpacked {
  using Quant = Q;
  static constexpr bool kPairs = false;
  static constexpr int kMaxBlocks = 32;
  alignas(64) uint8_t quants[kMaxBlocks][8][kPanelRows * 4];
  alignas(64) float d[kMaxBlocks][Q::kHalves][kPanelRows];
  alignas(64) float m[Q::kMin ? kMaxBlocks : 1][Q::kHalves][kPanelRows];

  void fill(const Packed<Q>& from, int64_t first, int64_t n) {
    for (int64_t b = 0; b < n; b++) {
      from.groups(first + b, [&](int g, int r, I w) __attribute__((always_inline)) {
        store(&quants[b][g][r * kLanes * 4], w);
      });
      for (int half = 0; half < Q::kHalves; half++)
        for (int r = 0; r < kRegs; r++) {
          F scale, offset;
          from.scales(first + b, half, r, scale, offset);
          store_f32(&d[b][half][r * kLanes], scale);
          if (Q::kMin) store_f32(&m[b][half][r * kLanes], offset);
        }
    }
  }
  PELTON_INLINE void scales(int64_t b, int half, int r, F& scale, F& offset) const {
    scale = load_f32(&d[b][half][r * kLanes]);
    if (Q::kMin) offset = load_f32(&m[b][half][r * kLanes]);
  }
  template <class Fn>
  PELTON_INLINE void groups(int64_t b, const Fn& f) const {
#pragma GCC unroll 8
    for (int g = 0; g < 8; g++)
#pragma GCC unroll 2
      for (int r = 0; r < kRegs; r++) f(g, r, load(&quants[b][g][r * kLanes * 4]));
  }
};

}  // namespace
