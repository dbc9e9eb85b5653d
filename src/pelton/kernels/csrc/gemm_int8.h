// linear with int8 activations: y = x W^T (+ bias), W in blocks of 32 columns (x16 layout).
//
// 1. Each token's row is quantised per 32 columns: d = max|x| / 127, q = round(x / d).
// 2. Panels of 16 rows are dealt to the threads. A tile is 16 rows x up to kTileTokens tokens: per block
//    of 32 columns an exact integer sum, then acc = fma(sum, d_w d_x, acc) and acc = fma(m_w, sum of x,
//    acc). That order is the same in every variant, so a row's result does not depend on the number of
//    tokens.
// Up to kFewTokens tokens unpack the weights in registers; more unpack a stretch of the panel once.
#pragma once
#include "gemm_quantise.h"
#include "gemm_source.h"
#include "gemm_split.h"

namespace {

constexpr int kFewTokens = 8;
// Below so many values every thread quantises for itself: cheaper than a barrier.
constexpr int64_t kPrivateValues = 4096;

// Adds blocks [0, n) of the source to acc, for R tokens.
template <class Source, int R>
PELTON_INLINE void tile(const Source& w, const uint8_t* act, int64_t n, F (&acc)[R][kRegs]) {
  using Q = typename Source::Quant;
  for (int64_t b = 0; b < n; b++, act += R * kActBytes) {
    const float* f = (const float*)(act + 32 * R);
    Dot<Q::kBits> dot[Q::kHalves][R][kRegs];
    for (int half = 0; half < Q::kHalves; half++)
      for (int t = 0; t < R; t++)
        for (int r = 0; r < kRegs; r++) dot[half][t][r].start((const int32_t*)(f + 2 * R + t));
    w.groups(b, [&](int g, int r, I weights) __attribute__((always_inline)) {
#pragma GCC unroll 4
      for (int t = 0; t < R; t++)
        dot[group_half<Q>(g)][t][r].add(group_order<Q>(g, Source::kPairs), weights,
                                        spread4(act + (g * R + t) * 4));
    });
#pragma GCC unroll 2
    for (int half = 0; half < Q::kHalves; half++)
#pragma GCC unroll 2
      for (int r = 0; r < kRegs; r++) {
        F d, m;
        w.scales(b, half, r, d, m);
#pragma GCC unroll 4
        for (int t = 0; t < R; t++) {
          acc[t][r] = fma(to_float(dot[half][t][r].sum()), mul(d, spread(f + t)), acc[t][r]);
          if (Q::kMin) acc[t][r] = fma(m, spread(f + (1 + half) * R + t), acc[t][r]);
        }
      }
  }
}

// Where a tile's results go: rows [row, row + 16) of the output, of which `rows` exist.
struct Target {
  float* out;  // of the tile's first token
  int64_t stride;
  const float* bias;  // of the first row; NULL: none
  int64_t rows;
};

template <int R>
PELTON_INLINE void load_tile(const Target& to, F (&acc)[R][kRegs]) {
  for (int t = 0; t < R; t++)
    for (int r = 0; r < kRegs; r++)
      acc[t][r] = load_f32(to.out + t * to.stride + r * kLanes, to.rows - r * kLanes);
}
template <int R>
PELTON_INLINE void store_tile(const Target& to, bool last, F (&acc)[R][kRegs]) {
  for (int r = 0; r < kRegs; r++) {
    const F bias = last && to.bias ? load_f32(to.bias + r * kLanes, to.rows - r * kLanes) : zero();
    for (int t = 0; t < R; t++) {
      const F v = last && to.bias ? add(acc[t][r], bias) : acc[t][r];
      float* p = to.out + t * to.stride + r * kLanes;
      if (to.rows >= kPanelRows)
        store_f32(p, v);
      else
        store_f32(p, v, to.rows - r * kLanes);
    }
  }
}

// Blocks [first, first + n) of `blocks`; acc continues from the output unless first is 0.
template <class Source, int R>
__attribute__((noinline)) void run_tile(const Source& w, const uint8_t* act, int64_t first, int64_t n,
                                        int64_t blocks, const Target& to) {
  F acc[R][kRegs];
  if (first == 0) {
    for (int t = 0; t < R; t++)
      for (int r = 0; r < kRegs; r++) acc[t][r] = zero();
  } else {
    load_tile<R>(to, acc);
  }
  tile<Source, R>(w, act + first * R * kActBytes, n, acc);
  store_tile<R>(to, first + n == blocks, acc);
}

// All tokens with one source.
template <class Source>
void run_tokens(const Source& w, const uint8_t* act, int64_t tokens, int64_t first, int64_t n, int64_t blocks,
                Target to) {
  constexpr int kFull = kTileTokens;
  for (int64_t t = 0; t < tokens; t += kFull, to.out += kFull * to.stride) {
    const uint8_t* group = act + act_group_offset(t / kFull, blocks);
    switch (tokens - t) {
      case 1: run_tile<Source, 1>(w, group, first, n, blocks, to); break;
      case 2: run_tile<Source, kFull < 2 ? kFull : 2>(w, group, first, n, blocks, to); break;
      case 3: run_tile<Source, kFull < 3 ? kFull : 3>(w, group, first, n, blocks, to); break;
      default: run_tile<Source, kFull>(w, group, first, n, blocks, to); break;
    }
  }
}

template <class Q>
void linear_int8(const pelton_call* call, pelton_team* team, int thread) {
  const pelton_tensor *x = call->in[0], *w = call->in[1], *bias = pelton_in(call, 2), *y = call->out[0];
  const int64_t tokens = x->shape[0], rows = w->shape[0], k = w->shape[1], blocks = k / 32;
  const int64_t panels = (rows + kPanelRows - 1) / kPanelRows, bytes = panel_bytes<Q>(k);

  alignas(64) uint8_t own[kPrivateValues / 32 * kActBytes];
  uint8_t* act = own;
  if (tokens * k <= kPrivateValues) {
    quantise_tokens<Q::kHalves>(x, 0, tokens, blocks, act);
  } else {
    act = (uint8_t*)call->workspace;
    for (PELTON_EACH_CHUNK(team, tokens, tokens < 64 ? 2 : 8, lo, hi))
      quantise_tokens<Q::kHalves>(x, lo, hi, blocks, act);
    pelton_barrier(team, thread);
  }

  const Split split(panels, pelton_team_size(team));
  int64_t lo, hi;
  while (split.claim(team, lo, hi)) {
    for (int64_t p = lo; p < hi; p++) {
      const int64_t row = p * kPanelRows;
      const Packed<Q> packed((const uint8_t*)w->data + p * bytes, k);
      const Target to = {(float*)y->data + row, y->stride[0], bias ? (const float*)bias->data + row : NULL,
                         rows - row};
      if (tokens <= kFewTokens) {
        run_tokens(packed, act, tokens, 0, blocks, blocks, to);
        continue;
      }
      Unpacked<Q> stretch;
      for (int64_t first = 0; first < blocks; first += stretch.kMaxBlocks) {
        const int64_t left = blocks - first, n = left < stretch.kMaxBlocks ? left : stretch.kMaxBlocks;
        stretch.fill(packed, first, n);
        run_tokens(stretch, act, tokens, first, n, blocks, to);
      }
    }
  }
}

}  // namespace
