// activation, gated_activation, softcap, add, mul, scale: element by element, so any split of the work
// gives the same result.
#include "activations.h"

namespace {

constexpr int64_t kChunk = 1024;  // elements of a row per claim

// Runs f(row, begin, length) over pieces of rows, claimed by the threads.
template <class F>
inline void each_piece(pelton_team* team, int64_t rows, int64_t dim, F f) {
  const int64_t pieces = (dim + kChunk - 1) / kChunk;
  const int64_t rows_per_claim = kChunk / (dim > 0 ? dim : 1) + 1;  // 1 where rows are long
  const int64_t groups = (rows + rows_per_claim - 1) / rows_per_claim;
  for (int64_t c; (c = pelton_claim(team, groups * pieces)) >= 0;) {
    const int64_t first = c / pieces * rows_per_claim, begin = c % pieces * kChunk;
    const int64_t last = first + rows_per_claim < rows ? first + rows_per_claim : rows;
    const int64_t length = dim - begin < kChunk ? dim - begin : kChunk;
    for (int64_t r = first; r < last; r++) f(r, begin, length);
  }
}

template <class F>
inline void unary(const pelton_call* c, pelton_team* team, F f) {
  const pelton_tensor *x = c->in[0], *y = c->out[0];
  each_piece(team, rows_of(x), last_dim(x), [&](int64_t r, int64_t begin, int64_t length) {
    const float* a = row_of(x, r) + begin;
    float* o = row_of(y, r) + begin;
    each_vector(length, [=](int64_t i, int n) { store_some(o + i, f(load_some(a + i, n)), n); });
  });
}

template <class F>
inline void binary(const pelton_call* c, pelton_team* team, F f) {
  const pelton_tensor *x = c->in[0], *z = c->in[1], *y = c->out[0];
  each_piece(team, rows_of(x), last_dim(x), [&](int64_t r, int64_t begin, int64_t length) {
    const float *a = row_of(x, r) + begin, *b = row_of(z, r) + begin;
    float* o = row_of(y, r) + begin;
    each_vector(length, [=](int64_t i, int n) {
      store_some(o + i, f(load_some(a + i, n), load_some(b + i, n)), n);
    });
  });
}

template <uint32_t KIND>
void activation_as(const pelton_call* c, pelton_team* team) {
  unary(c, team, [](vf x) { return activate<KIND>(x); });
}
template <uint32_t KIND>
void gated_activation_as(const pelton_call* c, pelton_team* team) {
  binary(c, team, [](vf gate, vf up) { return activate<KIND>(gate) * up; });
}

#define PELTON_BY_KIND(f)                                                                   \
  switch (pelton_string_attr(c, 0)) {                                                       \
    case PELTON_STRING("silu"): return f<PELTON_STRING("silu")>(c, team);                   \
    case PELTON_STRING("gelu"): return f<PELTON_STRING("gelu")>(c, team);                   \
    case PELTON_STRING("gelu_tanh"): return f<PELTON_STRING("gelu_tanh")>(c, team);         \
    default: return f<PELTON_STRING("relu")>(c, team);                                      \
  }

// in: x (any shape). attrs: kind (the tactic admits the four above only).
void activation(const pelton_call* c, pelton_team* team, int thread) { PELTON_BY_KIND(activation_as) }
// in: gate, up (T, I). attrs: kind.
void gated_activation(const pelton_call* c, pelton_team* team, int thread) { PELTON_BY_KIND(gated_activation_as) }

// in: x (any shape). attrs: cap.
void softcap(const pelton_call* c, pelton_team* team, int thread) {
  const float cap = (float)pelton_attr(c, 0, 1);
  const vf vcap = vset(cap), inverse = vset(1.0f / cap);
  unary(c, team, [=](vf x) { return vcap * vtanh(x * inverse); });
}

// in: a, b of the same shape.
void add(const pelton_call* c, pelton_team* team, int thread) {
  binary(c, team, [](vf a, vf b) { return a + b; });
}

// in: a, b of the same shape.
void mul(const pelton_call* c, pelton_team* team, int thread) {
  binary(c, team, [](vf a, vf b) { return a * b; });
}

// in: x (any shape). attrs: factor.
void scale(const pelton_call* c, pelton_team* team, int thread) {
  const vf factor = vset((float)pelton_attr(c, 0, 1));
  unary(c, team, [=](vf x) { return x * factor; });
}

}  // namespace

PELTON_KERNEL("cpu.activation", PELTON_SIMD_LEVEL, activation);
PELTON_KERNEL("cpu.gated_activation", PELTON_SIMD_LEVEL, gated_activation);
PELTON_KERNEL("cpu.softcap", PELTON_SIMD_LEVEL, softcap);
PELTON_KERNEL("cpu.add", PELTON_SIMD_LEVEL, add);
PELTON_KERNEL("cpu.mul", PELTON_SIMD_LEVEL, mul);
PELTON_KERNEL("cpu.scale", PELTON_SIMD_LEVEL, scale);
