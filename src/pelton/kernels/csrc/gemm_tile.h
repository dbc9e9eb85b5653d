// Where a tile's results go. Included after a gemm_vec_*.h.
#pragma once
#include "gemm_source.h"

namespace {

// Rows [row, row + 16) of the output, of which `rows` exist, from one token on.
struct Target {
  float* out;
  int64_t stride;
  const float* bias;  // of the first row; NULL: none
  int64_t rows;
};

// The first `tokens` of R tokens.
template <int R>
PELTON_INLINE void load_tile(const Target& to, int64_t tokens, F (&acc)[R][kRegs]) {
  for (int t = 0; t < R; t++)
    for (int r = 0; r < kRegs; r++)
      acc[t][r] = t < tokens ? load_f32(to.out + t * to.stride + r * kLanes, to.rows - r * kLanes) : zero();
}
template <int R>
PELTON_INLINE void store_tile(const Target& to, int64_t tokens, bool last, F (&acc)[R][kRegs]) {
  for (int r = 0; r < kRegs; r++) {
    const F bias = last && to.bias ? load_f32(to.bias + r * kLanes, to.rows - r * kLanes) : zero();
    for (int t = 0; t < R; t++) {
      if (t >= tokens) break;
      const F v = last && to.bias ? add(acc[t][r], bias) : acc[t][r];
      float* p = to.out + t * to.stride + r * kLanes;
      if (to.rows >= kPanelRows)
        store_f32(p, v);
      else
        store_f32(p, v, to.rows - r * kLanes);
    }
  }
}

}  // namespace
