// linear with float32 activations: dense weights as they are, block weights dequantised exactly.
//
// A stretch of a panel becomes float32 [k][16] once (not even that when it is float32 already); a tile is
// 16 rows x up to kTileTokensF32 tokens, acc = fma(w, x, acc) over k in order in every variant, so a row's
// result does not depend on the number of tokens.
#pragma once
#include "gemm_int8.h"

namespace {

struct Float32 {
  static constexpr int kBytes = 4;
};
struct BFloat16 {
  static constexpr int kBytes = 2;
};
struct Float16 {
  static constexpr int kBytes = 2;
};

constexpr int kStretch = 256;  // columns

// Packed panel of type W, k columns -> columns [first, first + n) as float32 [n][16], in `buffer` or in place.
template <class W>
struct Panel {
  static constexpr int kMultiple = 32;  // of `first` and n
  static int64_t bytes(int64_t k) { return panel_bytes<W>(k); }
  static const float* stretch(const uint8_t* panel, int64_t k, int64_t first, int64_t n, float* buffer) {
    const Packed<W> from(panel, k);
    for (int64_t b = 0; b < n / 32; b++, buffer += 32 * kPanelRows) {
      F d[W::kHalves][kRegs], m[W::kHalves][kRegs];
      for (int half = 0; half < W::kHalves; half++)
        for (int r = 0; r < kRegs; r++) from.scales(first / 32 + b, half, r, d[half][r], m[half][r]);
      from.groups(first / 32 + b, [&](int g, int r, I w) __attribute__((always_inline)) {
        for (int j = 0; j < 4; j++) {
          const F q = W::kBits == 8 ? column_i8(w, j) : column_u8(w, j);
          const int half = group_half<W>(g);
          store_f32(buffer + (4 * g + j) * kPanelRows + r * kLanes,
                    W::kMin ? fma(q, d[half][r], m[half][r]) : mul(q, d[half][r]));
        }
      });
    }
    return buffer - n * kPanelRows;
  }
};
template <>
struct Panel<Float32> {
  static int64_t bytes(int64_t k) { return k * kPanelRows * 4; }
  static const float* stretch(const uint8_t* panel, int64_t, int64_t first, int64_t, float*) {
    return (const float*)panel + first * kPanelRows;
  }
};
template <>
struct Panel<BFloat16> {
  static int64_t bytes(int64_t k) { return k * kPanelRows * 2; }
  static const float* stretch(const uint8_t* panel, int64_t, int64_t first, int64_t n, float* buffer) {
    const uint16_t* from = (const uint16_t*)panel + first * kPanelRows;
    for (int64_t i = 0; i < n * kPanelRows; i += kLanes) store_f32(buffer + i, load_bf16(from + i));
    return buffer;
  }
};
template <>
struct Panel<Float16> {
  static int64_t bytes(int64_t k) { return k * kPanelRows * 2; }
  static const float* stretch(const uint8_t* panel, int64_t, int64_t first, int64_t n, float* buffer) {
    const uint16_t* from = (const uint16_t*)panel + first * kPanelRows;
    for (int64_t i = 0; i < n * kPanelRows; i += kLanes) store_f32(buffer + i, load_f16(from + i));
    return buffer;
  }
};

// R tokens of x (columns [first, first + n) of k) times one stretch.
template <int R>
__attribute__((noinline)) void run_tile_f32(const float* w, const float* x, int64_t stride, int64_t first,
                                            int64_t n, int64_t k, const Target& to) {
  F acc[R][kRegs];
  if (first == 0) {
    for (int t = 0; t < R; t++)
      for (int r = 0; r < kRegs; r++) acc[t][r] = zero();
  } else {
    load_tile<R>(to, acc);
  }
  for (int64_t i = 0; i < n; i++, w += kPanelRows, x++) {
    F weights[kRegs];
    for (int r = 0; r < kRegs; r++) weights[r] = load_f32(w + r * kLanes);
    for (int t = 0; t < R; t++) {
      const F value = spread(x + t * stride);
      for (int r = 0; r < kRegs; r++) acc[t][r] = fma(weights[r], value, acc[t][r]);
    }
  }
  store_tile<R>(to, first + n == k, acc);
}

template <class W>
void linear_f32(const pelton_call* call, pelton_team* team, int) {
  const pelton_tensor *x = call->in[0], *w = call->in[1], *bias = pelton_in(call, 2), *y = call->out[0];
  const int64_t tokens = x->shape[0], rows = w->shape[0], k = w->shape[1];
  const int64_t panels = (rows + kPanelRows - 1) / kPanelRows, bytes = Panel<W>::bytes(k);

  alignas(64) float buffer[kStretch * kPanelRows];
  const Split split(panels, pelton_team_size(team));
  int64_t lo, hi;
  while (split.claim(team, lo, hi)) {
    for (int64_t p = lo; p < hi; p++) {
      const int64_t row = p * kPanelRows;
      for (int64_t first = 0; first < k; first += kStretch) {
        const int64_t n = k - first < kStretch ? k - first : kStretch;
        const float* weights =
            Panel<W>::stretch((const uint8_t*)w->data + p * bytes, k, first, n, buffer);
        Target to = {(float*)y->data + row, y->stride[0], bias ? (const float*)bias->data + row : NULL,
                     rows - row};
        constexpr int kFull = kTileTokensF32;
        for (int64_t t = 0; t < tokens; t += kFull, to.out += kFull * to.stride) {
          const float* in = pelton_row_f32(x, t) + first;
          const int64_t s = x->stride[0];
          switch (tokens - t) {
            case 1: run_tile_f32<1>(weights, in, s, first, n, k, to); break;
            case 2: run_tile_f32<kFull < 2 ? kFull : 2>(weights, in, s, first, n, k, to); break;
            case 3: run_tile_f32<kFull < 3 ? kFull : 3>(weights, in, s, first, n, k, to); break;
            case 4: run_tile_f32<kFull < 4 ? kFull : 4>(weights, in, s, first, n, k, to); break;
            case 5: run_tile_f32<kFull < 5 ? kFull : 5>(weights, in, s, first, n, k, to); break;
            case 6: run_tile_f32<kFull < 6 ? kFull : 6>(weights, in, s, first, n, k, to); break;
            case 7: run_tile_f32<kFull < 7 ? kFull : 7>(weights, in, s, first, n, k, to); break;
            default: run_tile_f32<kFull>(weights, in, s, first, n, k, to); break;
          }
        }
      }
    }
  }
}

}  // namespace
