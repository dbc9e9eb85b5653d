// Sixteen tokens at a time with AMX's tiles: C (16 tokens x 16 rows, int32) = A (tokens x 32 columns, int8, as
// quantised rows stand in memory) times B (a block of an unpacked panel). Scaling is AVX-512's: the same operations in
// the same order as a tile of fewer tokens does, on the same exact sums.
//
// Instructions are spelled out, for GCC's intrinsics do not tell the compiler that they touch memory.
#pragma once
#include "gemm_int8.h"

namespace {

constexpr int kAmxTokens = 16;

// Tile 0: sums. Tile 1: activations. Tile 2: weights.
inline void configure_tiles(int columns) {
  alignas(64) uint8_t config[64] = {1};  // palette 1
  uint16_t* row_bytes = (uint16_t*)(config + 16);
  uint8_t* rows = config + 48;
  rows[0] = kAmxTokens, row_bytes[0] = 4 * kPanelRows;
  rows[1] = kAmxTokens, row_bytes[1] = (uint16_t)columns;
  rows[2] = (uint8_t)(columns / 4), row_bytes[2] = 4 * kPanelRows;
  asm volatile("ldtilecfg %0" ::"m"(config) : "memory");
}

template <class Q>
using Sums = int32_t[Q::kHalves][kAmxTokens][kPanelRows];

// Integer sums of one block: `x` is the block of the first token.
template <class Q>
PELTON_INLINE void block_sums(const uint8_t* x, int64_t stride, const uint8_t (&quants)[8][kPanelRows * 4],
                              Sums<Q>& sums) {
#pragma GCC unroll 2
  for (int half = 0; half < Q::kHalves; half++) {
    asm volatile("tilezero %%tmm0\n\ttileloadd (%0,%1,1), %%tmm1\n\ttileloadd (%2,%3,1), %%tmm2" ::"r"(x + 16 * half),
                 "r"(stride), "r"(quants[4 * half]), "r"((int64_t)kPanelRows * 4)
                 : "memory");
    if (Q::kBits == 8)
      asm volatile("tdpbssd %%tmm2, %%tmm1, %%tmm0" ::: "memory");
    else
      asm volatile("tdpbsud %%tmm2, %%tmm1, %%tmm0" ::: "memory");
    asm volatile("tilestored %%tmm0, (%0,%1,1)" ::"r"(sums[half]), "r"((int64_t)kPanelRows * 4) : "memory");
  }
}

// Blocks [first, first + n) of `blocks` for 16 tokens; acc continues from the output unless first is 0.
template <class Q>
__attribute__((noinline)) void amx_tile(const Unpacked<Q>& w, const Act& x, int64_t first, int64_t n,
                                        int64_t blocks, const Target& to) {
  static_assert(kRegs == 1, "a register holds a panel's rows");
  alignas(64) Sums<Q> sums[2];
  F acc[kAmxTokens][1];
  if (first == 0) {
    for (int t = 0; t < kAmxTokens; t++) acc[t][0] = zero();
  } else {
    load_tile<kAmxTokens>(to, kAmxTokens, acc);
  }
  const uint8_t* at = x.data + first * kActBytes;
  block_sums<Q>(at, x.stride, w.quants[0], sums[0]);
  for (int64_t b = 0; b < n; b++, at += kActBytes) {
    if (b + 1 < n) block_sums<Q>(at + kActBytes, x.stride, w.quants[b + 1], sums[(b + 1) & 1]);
    const uint8_t* four[4] = {at, at + 4 * x.stride, at + 8 * x.stride, at + 12 * x.stride};
#pragma GCC unroll 2
    for (int half = 0; half < Q::kHalves; half++) {
      F d, m;
      w.scales(b, half, 0, d, m);
#pragma GCC unroll 16
      for (int t = 0; t < kAmxTokens; t++) {
        const uint8_t* block = four[t / 4] + t % 4 * x.stride;
        I sum = load(sums[b & 1][half][t]);
        if (Q::kZero) {
          const I times = _mm512_set1_epi32(halves_times<Q>(half, -Q::kZero));
          sum = add(sum, _mm512_madd_epi16(spread4(block + kActHalves), times));
        }
        acc[t][0] = fma(to_float(sum), mul(d, spread((const float*)(block + kActScale))), acc[t][0]);
        if (Q::kMin) acc[t][0] = fma(m, spread((const float*)(block + kActSum)), acc[t][0]);
      }
    }
  }
  store_tile<kAmxTokens>(to, kAmxTokens, first + n == blocks, acc);
}

// As many groups of 16 tokens as there are; what is left stays in x and `to`.
template <class Q>
void amx_tokens(const Unpacked<Q>& w, Act& x, int64_t first, int64_t n, int64_t blocks, Target& to) {
  if (x.tokens < kAmxTokens) return;
  configure_tiles(32 / Q::kHalves);
  for (; x.tokens >= kAmxTokens; x.tokens -= kAmxTokens) {
    amx_tile(w, x, first, n, blocks, to);
    x.data += kAmxTokens * x.stride;
    to.out += kAmxTokens * to.stride;
  }
  asm volatile("tilerelease" ::: "memory");
}

}  // namespace
