// linear: y = x W^T (+ bias), and linear_gated: act(gate) * up of a stacked product, for any product M of a panel
// (Int8<Q>, Float<W>).
//
// Work is dealt in panels of 16 rows times kTokensAtOnce tokens. Their input stays in L2 meanwhile, and a weight
// is read once for each such range of tokens.
#pragma once
#include "activations.h"
#include "gemm_split.h"
#include "gemm_tile.h"

namespace {

constexpr int64_t kTokensAtOnce = 256;
// A thread's scratch: its own copy of a small input, then gate and up of a few panels.
constexpr int64_t kOwnBytes = 8192, kGatedFloats = kTokensAtOnce * kPanelRows;
static_assert(kOwnBytes + 2 * kGatedFloats * 4 <= PELTON_SCRATCH_BYTES, "scratch is too small");

// f(panel, first token, number of tokens) for what this thread claims of `panels` times `tokens`.
template <class Fn>
inline void each_piece(pelton_team* team, int64_t panels, int64_t tokens, const Fn& f) {
  const Split split(panels * ((tokens + kTokensAtOnce - 1) / kTokensAtOnce), pelton_team_size(team), tokens <= 8);
  int64_t lo, hi;
  while (split.claim(team, lo, hi))
    for (int64_t i = lo; i < hi; i++) {
      const int64_t t = i / panels * kTokensAtOnce;
      f(i % panels, t, tokens - t < kTokensAtOnce ? tokens - t : kTokensAtOnce);
    }
}

// in: x (float32, or quantised rows), weight, [bias]. out: y.
template <class M>
void linear(const pelton_call* call, pelton_team* team, int thread) {
  const pelton_tensor *w = call->in[1], *bias = pelton_in(call, 2), *y = call->out[0];
  const int64_t rows = w->shape[0], k = w->shape[1], bytes = M::panel_bytes(k);
  const typename M::Input x = M::input(call, team, thread, (uint8_t*)pelton_scratch(team, thread));
  each_piece(team, (rows + kPanelRows - 1) / kPanelRows, y->shape[0], [&](int64_t p, int64_t t, int64_t n) {
    const int64_t row = p * kPanelRows;
    const Target to = {pelton_row_f32(y, t) + row, y->stride[0], bias ? (const float*)bias->data + row : NULL,
                       rows - row};
    M::multiply((const uint8_t*)w->data + p * bytes, k, M::tokens(x, t, n), to);
  });
}

template <uint32_t KIND>
inline void gate_rows(const float* gate, const float* up, int64_t width, int64_t n, float* y, int64_t y_stride) {
  for (int64_t t = 0; t < n; t++, gate += width, up += width, y += y_stride)
    for (int64_t i = 0; i < width; i += LANES) store(y + i, activate<KIND>(load(gate + i)) * load(up + i));
}

// Panels of gate, and of up, in one go: several for few tokens, so that weights come in long streams.
inline int64_t gated_panels(int64_t panels, int64_t tokens, int threads) {
  int64_t group = panels / (8 * threads);
  if (group > 8) group = 8;
  if (group * tokens > kTokensAtOnce) group = kTokensAtOnce / tokens;
  return group > 1 ? group : 1;
}

// in: x, weight (2 I rows, the gate's first; the tactic admits multiples of 16 for I), [bias]. attrs: kind.
template <class M>
void linear_gated(const pelton_call* call, pelton_team* team, int thread) {
  const pelton_tensor *w = call->in[1], *bias = pelton_in(call, 2), *y = call->out[0];
  const int64_t k = w->shape[1], bytes = M::panel_bytes(k), panels = y->shape[1] / kPanelRows;
  const int64_t group = gated_panels(panels, y->shape[0], pelton_team_size(team));
  const uint8_t* weights = (const uint8_t*)w->data;
  uint8_t* own = (uint8_t*)pelton_scratch(team, thread);
  float *gate = (float*)(own + kOwnBytes), *up = gate + kGatedFloats;
  const typename M::Input x = M::input(call, team, thread, own);
  each_piece(team, (panels + group - 1) / group, y->shape[0], [&](int64_t piece, int64_t t, int64_t n) {
    const typename M::Input part = M::tokens(x, t, n);
    const int64_t lo = piece * group, count = panels - lo < group ? panels - lo : group, width = count * kPanelRows;
    const auto half = [&](int64_t first, float* out) {
      for (int64_t i = 0; i < count; i++) {
        const float* b = bias ? (const float*)bias->data + (first + i) * kPanelRows : NULL;
        M::multiply(weights + (first + i) * bytes, k, part, Target{out + i * kPanelRows, width, b, kPanelRows});
      }
    };
    half(lo, gate);
    half(panels + lo, up);
    float* to = pelton_row_f32(y, t) + lo * kPanelRows;
    const int64_t s = y->stride[0];
    switch (pelton_string_attr(call, 0)) {
      case PELTON_STRING("silu"): return gate_rows<PELTON_STRING("silu")>(gate, up, width, n, to, s);
      case PELTON_STRING("gelu"): return gate_rows<PELTON_STRING("gelu")>(gate, up, width, n, to, s);
      case PELTON_STRING("gelu_tanh"): return gate_rows<PELTON_STRING("gelu_tanh")>(gate, up, width, n, to, s);
      default: return gate_rows<PELTON_STRING("relu")>(gate, up, width, n, to, s);
    }
  });
}

}  // namespace
