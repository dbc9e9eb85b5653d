// unary, binary, binary_scalar: element by element, so any split of the work gives the same result.
//
// binary broadcasts by NumPy's rules: an axis of 1 (or a missing leading one) has stride 0. Its
// operands may be any float type; the result is float32.
#include "simd.h"

namespace {

constexpr int64_t kPiece = 1024;  // elements of a row per claim

// ---- Operands ------------------------------------------------------------------------------------
// A tensor seen in the shape of the output.
struct Broadcast {
  const char* data;
  int32_t dtype;
  int64_t stride[PELTON_MAX_DIMS];  // in elements, by axis of the output
  bool splat;                       // one value per row
};

inline Broadcast broadcast(const pelton_tensor* t, const pelton_tensor* out) {
  Broadcast b = {(const char*)t->data, t->dtype, {0}, false};
  const int missing = out->ndim - t->ndim;
  for (int i = missing; i < out->ndim; i++)
    if (t->shape[i - missing] != 1) b.stride[i] = t->stride[i - missing];
  b.splat = out->ndim == 0 || b.stride[out->ndim - 1] == 0;
  return b;
}

inline int64_t row_offset_in(const Broadcast& b, const pelton_tensor* out, int64_t row) {
  int64_t offset = 0;
  for (int i = out->ndim - 2; i >= 0; i--) {
    offset += row % out->shape[i] * b.stride[i];
    row /= out->shape[i];
  }
  return offset;
}

// Elements [begin, begin + length) of a row as float32: in place, or put into `buffer`.
inline const float* fetch(const Broadcast& b, int64_t offset, int64_t begin, int64_t length, float* buffer) {
  if (b.splat) {
    const float value = pelton_load(b.data, b.dtype, offset);
    for (int64_t i = 0; i < length; i++) buffer[i] = value;
    return buffer;
  }
  if (b.dtype == PELTON_F32) return (const float*)b.data + offset + begin;
  for (int64_t i = 0; i < length; i++) buffer[i] = pelton_load(b.data, b.dtype, offset + begin + i);
  return buffer;
}

// Runs f(row, begin, length) over pieces of rows, claimed by the threads.
template <class F>
inline void each_piece(pelton_team* team, int64_t rows, int64_t dim, F f) {
  const int64_t pieces = (dim + kPiece - 1) / kPiece;
  const int64_t rows_per_claim = kPiece / (dim > 0 ? dim : 1) + 1;  // 1 where rows are long
  const int64_t groups = (rows + rows_per_claim - 1) / rows_per_claim;
  for (int64_t c; (c = pelton_claim(team, groups * pieces)) >= 0;) {
    const int64_t first = c / pieces * rows_per_claim, begin = c % pieces * kPiece;
    const int64_t last = first + rows_per_claim < rows ? first + rows_per_claim : rows;
    const int64_t length = dim - begin < kPiece ? dim - begin : kPiece;
    for (int64_t r = first; r < last; r++) f(r, begin, length);
  }
}

// ---- Functions -----------------------------------------------------------------------------------
// f of each lane, through the C library.
template <class F>
inline vf each_lane(vf x, F f) {
  float lanes[LANES];
  store(lanes, x);
  for (int i = 0; i < LANES; i++) lanes[i] = f(lanes[i]);
  return load(lanes);
}
inline vf vpow(vf x, vf y) {
  float a[LANES], b[LANES];
  store(a, x);
  store(b, y);
  for (int i = 0; i < LANES; i++) a[i] = powf(a[i], b[i]);
  return load(a);
}

template <class F>
inline void map(const pelton_call* c, pelton_team* team, F f) {
  const pelton_tensor *x = c->in[0], *y = c->out[0];
  each_piece(team, rows_of(x), last_dim(x), [&](int64_t r, int64_t begin, int64_t length) {
    const float* a = row_of(x, r) + begin;
    float* o = row_of(y, r) + begin;
    each_vector(length, [=](int64_t i, int n) { store_some(o + i, f(load_some(a + i, n)), n); });
  });
}

template <class F>
inline void map_pairs(const pelton_call* c, pelton_team* team, F f) {
  const pelton_tensor* out = c->out[0];
  const Broadcast x = broadcast(c->in[0], out), y = broadcast(c->in[1], out);
  each_piece(team, rows_of(out), last_dim(out), [&](int64_t r, int64_t begin, int64_t length) {
    float x_piece[kPiece], y_piece[kPiece];
    const float* a = fetch(x, row_offset_in(x, out, r), begin, length, x_piece);
    const float* b = fetch(y, row_offset_in(y, out, r), begin, length, y_piece);
    float* o = row_of(out, r) + begin;
    each_vector(length, [=](int64_t i, int n) {
      store_some(o + i, f(load_some(a + i, n), load_some(b + i, n)), n);
    });
  });
}

// ---- Kernels (the tactics admit the kinds listed here only) --------------------------------------
// in: x (any shape). attrs: kind.
void unary(const pelton_call* c, pelton_team* team, int thread) {
  switch (pelton_string_attr(c, 0)) {
    case PELTON_STRING("abs"): return map(c, team, [](vf x) { return vabs(x); });
    case PELTON_STRING("cos"): return map(c, team, [](vf x) { return each_lane(x, cosf); });
    case PELTON_STRING("exp"): return map(c, team, [](vf x) { return vexp(x); });
    case PELTON_STRING("log"): return map(c, team, [](vf x) { return each_lane(x, logf); });
    case PELTON_STRING("neg"): return map(c, team, [](vf x) { return -x; });
    case PELTON_STRING("reciprocal"): return map(c, team, [](vf x) { return vset(1.0f) / x; });
    case PELTON_STRING("rsqrt"): return map(c, team, [](vf x) { return vset(1.0f) / vsqrt(x); });
    case PELTON_STRING("sigmoid"): return map(c, team, [](vf x) { return vsigmoid(x); });
    case PELTON_STRING("sin"): return map(c, team, [](vf x) { return each_lane(x, sinf); });
    case PELTON_STRING("sqrt"): return map(c, team, [](vf x) { return vsqrt(x); });
    case PELTON_STRING("square"): return map(c, team, [](vf x) { return x * x; });
    default: return map(c, team, [](vf x) { return vtanh(x); });
  }
}

// in: x, y (shapes that broadcast to the output's). attrs: kind.
void binary(const pelton_call* c, pelton_team* team, int thread) {
  switch (pelton_string_attr(c, 0)) {
    case PELTON_STRING("add"): return map_pairs(c, team, [](vf x, vf y) { return x + y; });
    case PELTON_STRING("div"): return map_pairs(c, team, [](vf x, vf y) { return x / y; });
    case PELTON_STRING("max"): return map_pairs(c, team, [](vf x, vf y) { return vmax_nan(x, y); });
    case PELTON_STRING("min"): return map_pairs(c, team, [](vf x, vf y) { return vmin_nan(x, y); });
    case PELTON_STRING("mul"): return map_pairs(c, team, [](vf x, vf y) { return x * y; });
    case PELTON_STRING("pow"): return map_pairs(c, team, [](vf x, vf y) { return vpow(x, y); });
    default: return map_pairs(c, team, [](vf x, vf y) { return x - y; });
  }
}

// in: x (any shape). attrs: value, kind.
void binary_scalar(const pelton_call* c, pelton_team* team, int thread) {
  const float number = (float)pelton_attr(c, 0, 0);
  const vf value = vset(number);
  switch (pelton_string_attr(c, 1)) {
    case PELTON_STRING("add"): return map(c, team, [=](vf x) { return x + value; });
    case PELTON_STRING("div"): return map(c, team, [=](vf x) { return x / value; });
    case PELTON_STRING("max"): return map(c, team, [=](vf x) { return vmax(value, x); });
    case PELTON_STRING("min"): return map(c, team, [=](vf x) { return vmin(value, x); });
    case PELTON_STRING("pow"): return map(c, team, [=](vf x) { return each_lane(x, [=](float a) { return powf(a, number); }); });
    case PELTON_STRING("rdiv"): return map(c, team, [=](vf x) { return value / x; });
    default: return map(c, team, [=](vf x) { return value - x; });
  }
}

}  // namespace

PELTON_KERNEL("cpu.unary", PELTON_SIMD_LEVEL, unary);
PELTON_KERNEL("cpu.binary", PELTON_SIMD_LEVEL, binary);
PELTON_KERNEL("cpu.binary_scalar", PELTON_SIMD_LEVEL, binary_scalar);
