// Panels times int8 activations: W in blocks of 32 columns (x16 layout), x quantised (quantise.h).
//
// A tile is 16 rows x up to kTileTokens tokens: per block of 32 columns an exact integer sum, then acc =
// fma(sum, d_w d_x, acc), and acc = fma(m_w, sum of x, acc) where the type has m. That order is the same in every
// variant, so a row's result does not depend on the number of tokens. Up to Few tokens unpack the weights in
// registers; more unpack a stretch of the panel once.
#pragma once
#include "gemm_tile.h"
#include "quantise.h"

namespace {

// Below so many values every thread quantises for itself: cheaper than a barrier.
constexpr int64_t kPrivateValues = 4096;

// Adds blocks [0, n) of the source to acc, for R tokens whose blocks begin at row[t].
template <class Source, int R>
PELTON_INLINE void tile(const Source& w, const uint8_t* const (&row)[R], int64_t n, F (&acc)[R][kRegs]) {
  using Q = typename Source::Quant;
  for (int64_t b = 0, at = 0; b < n; b++, at += kActBytes) {
    Dot<Q> dot[Q::kHalves][R][kRegs];
    for (int half = 0; half < Q::kHalves; half++)
      for (int t = 0; t < R; t++)
        for (int r = 0; r < kRegs; r++) dot[half][t][r].start(row[t] + at + kActHalves, half);
    w.groups(b, [&](int g, int r, I weights) __attribute__((always_inline)) {
#pragma GCC unroll 8
      for (int t = 0; t < R; t++)
        dot[group_half<Q>(g)][t][r].add(group_order<Q>(g, Source::kPairs), weights, spread4(row[t] + at + 4 * g));
    });
#pragma GCC unroll 2
    for (int half = 0; half < Q::kHalves; half++)
#pragma GCC unroll 2
      for (int r = 0; r < kRegs; r++) {
        F d, m;
        w.scales(b, half, r, d, m);
#pragma GCC unroll 8
        for (int t = 0; t < R; t++) {
          const uint8_t* block = row[t] + at;
          const F sum = to_float(dot[half][t][r].sum(block + kActHalves, half));
          acc[t][r] = fma(sum, mul(d, spread((const float*)(block + kActScale))), acc[t][r]);
          if (Q::kMin) acc[t][r] = fma(m, spread((const float*)(block + kActSum)), acc[t][r]);
        }
      }
  }
}

// `tokens` of quantised rows.
struct Act {
  const uint8_t* data;
  int64_t stride;  // bytes
  int64_t tokens;
};

// Blocks [first, first + n) of `blocks` for the first R tokens or fewer; acc continues from the output unless
// first is 0.
template <class Source, int R>
__attribute__((noinline)) void run_tile(const Source& w, const Act& x, int64_t first, int64_t n, int64_t blocks,
                                        const Target& to) {
  const uint8_t* row[R];
  for (int t = 0; t < R; t++)  // what a tile has too many are copies of its last
    row[t] = x.data + (t < x.tokens ? t : x.tokens - 1) * x.stride + first * kActBytes;
  F acc[R][kRegs];
  if (first == 0) {
    for (int t = 0; t < R; t++)
      for (int r = 0; r < kRegs; r++) acc[t][r] = zero();
  } else {
    load_tile<R>(to, x.tokens, acc);
  }
  tile<Source, R>(w, row, n, acc);
  store_tile<R>(to, x.tokens, first + n == blocks, acc);
}

// All tokens with one source.
template <class Source>
void run_tokens(const Source& w, Act x, int64_t first, int64_t n, int64_t blocks, Target to) {
  constexpr int kFull = kTileTokens;
  while (x.tokens > 0) {
    const int64_t tokens = x.tokens < kFull ? x.tokens : kFull, rest = x.tokens - tokens;
    x.tokens = tokens;
    if (tokens > kFull / 2)
      run_tile<Source, kFull>(w, x, first, n, blocks, to);
    else if (tokens > 2)
      run_tile<Source, kFull < 4 ? kFull : 4>(w, x, first, n, blocks, to);
    else if (tokens > 1)
      run_tile<Source, kFull < 2 ? kFull : 2>(w, x, first, n, blocks, to);
    else
      run_tile<Source, 1>(w, x, first, n, blocks, to);
    x.data += tokens * x.stride;
    x.tokens = rest;
    to.out += tokens * to.stride;
  }
}

// A panel times all tokens. Either way gives the same results, bit for bit.
template <class Q>
__attribute__((noinline)) void multiply_packed(const uint8_t* panel, int64_t k, const Act& x, const Target& to) {
  run_tokens(Packed<Q>(panel, k), x, 0, k / 32, k / 32, to);
}
template <class Q>
__attribute__((noinline)) void multiply_unpacked(const uint8_t* panel, int64_t k, const Act& x, const Target& to) {
  const int64_t blocks = k / 32;
  Unpacked<Q> stretch;
  for (int64_t first = 0; first < blocks; first += stretch.kMaxBlocks) {
    const int64_t left = blocks - first, n = left < stretch.kMaxBlocks ? left : stretch.kMaxBlocks;
    stretch.fill(Packed<Q>(panel, k), first, n);
    run_tokens(stretch, x, first, n, blocks, to);
  }
}

// The product of weights of type Q with int8 activations, a panel at a time.
template <class Q, int Few>
struct Int8 {
  using Input = Act;
  static int64_t panel_bytes(int64_t k) { return ::panel_bytes<Q>(k); }

  // The quantised rows of a call's first input: as they come, or made in the workspace or in `own`.
  static Act input(const pelton_call* call, pelton_team* team, int thread, uint8_t* own) {
    const pelton_tensor* x = call->in[0];
    const int64_t tokens = x->shape[0], k = call->in[1]->shape[1], blocks = k / 32, stride = blocks * kActBytes;
    if (x->dtype == PELTON_U8) return {(const uint8_t*)x->data, x->stride[0], tokens};
    if (tokens * k <= kPrivateValues) {
      for (int64_t t = 0; t < tokens; t++) quantise_row(pelton_row_f32(x, t), blocks, own + t * stride);
      return {own, stride, tokens};
    }
    uint8_t* shared = (uint8_t*)call->workspace;
    for (PELTON_EACH_CHUNK(team, tokens, tokens < 64 ? 2 : 8, lo, hi))
      for (int64_t t = lo; t < hi; t++) quantise_row(pelton_row_f32(x, t), blocks, shared + t * stride);
    pelton_barrier(team, thread);
    return {shared, stride, tokens};
  }
  static Act tokens(const Act& x, int64_t first, int64_t n) { return {x.data + first * x.stride, x.stride, n}; }

  static void multiply(const uint8_t* panel, int64_t k, const Act& x, const Target& to) {
    return x.tokens <= Few ? multiply_packed<Q>(panel, k, x, to) : multiply_unpacked<Q>(panel, k, x, to);
  }
};

}  // namespace
