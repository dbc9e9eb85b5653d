// Panels times float32 activations: dense weights as they are, block weights dequantised exactly.
//
// A stretch of a panel becomes float32 [k][16] once (not even that when it is float32 already); a tile is
// 16 rows x up to kTileTokensF32 tokens, acc = fma(w, x, acc) over k in order in every variant, so a row's
// result does not depend on the number of tokens.
#pragma once
#include "gemm_tile.h"

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
        for (int r = 0; r < kRegs; r++) {
          from.scales(first / 32 + b, half, r, d[half][r], m[half][r]);
          if (!W::kMin) m[half][r] = mul(d[half][r], constant(-W::kZero));
        }
      from.groups(first / 32 + b, [&](int g, int r, I w) __attribute__((always_inline)) {
        for (int j = 0; j < 4; j++) {
          const F q = W::kBits == 8 ? column_i8(w, j) : column_u8(w, j);
          const int half = group_half<W>(g);
          store_f32(buffer + (4 * g + j) * kPanelRows + r * kLanes,
                    W::kBits == 8 && !W::kMin ? mul(q, d[half][r]) : fma(q, d[half][r], m[half][r]));
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
    load_tile<R>(to, R, acc);
  }
  for (int64_t i = 0; i < n; i++, w += kPanelRows, x++) {
    F weights[kRegs];
    for (int r = 0; r < kRegs; r++) weights[r] = load_f32(w + r * kLanes);
    for (int t = 0; t < R; t++) {
      const F value = spread(x + t * stride);
      for (int r = 0; r < kRegs; r++) acc[t][r] = fma(weights[r], value, acc[t][r]);
    }
  }
  store_tile<R>(to, R, first + n == k, acc);
}

// The product of weights of type W with float32 activations, a panel at a time.
template <class W>
struct Float {
  struct Input {
    const float* data;
    int64_t stride, tokens;
  };
  static int64_t panel_bytes(int64_t k) { return Panel<W>::bytes(k); }
  static Input input(const pelton_call* call, pelton_team*, int, uint8_t*) {
    const pelton_tensor* x = call->in[0];
    return {(const float*)x->data, x->stride[0], x->shape[0]};
  }
  static Input tokens(const Input& x, int64_t first, int64_t n) { return {x.data + first * x.stride, x.stride, n}; }

  __attribute__((noinline)) static void multiply(const uint8_t* panel, int64_t k, const Input& x, const Target& all) {
    alignas(64) float buffer[kStretch * kPanelRows];
    constexpr int kFull = kTileTokensF32;
    for (int64_t first = 0; first < k; first += kStretch) {
      const int64_t n = k - first < kStretch ? k - first : kStretch, s = x.stride;
      const float *weights = Panel<W>::stretch(panel, k, first, n, buffer), *in = x.data + first;
      Target to = all;
      for (int64_t t = 0; t < x.tokens; t += kFull, to.out += kFull * to.stride, in += kFull * s) {
        switch (x.tokens - t) {
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
};

}  // namespace
