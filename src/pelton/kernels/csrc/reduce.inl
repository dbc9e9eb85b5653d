// reduce, softmax: one row at a time, rows shared out among the threads.
#include "simd.h"

namespace {

// Rows per claim: about a microsecond of work.
inline int64_t rows_per_claim(int64_t dim) { return 2048 / (dim > 0 ? dim : 1) + 1; }

inline float sum_row(const float* x, int64_t dim) {
  vf a = vset(0), b = vset(0);
  int64_t i = 0;
  for (; i + 2 * LANES <= dim; i += 2 * LANES) {
    a = a + load(x + i);
    b = b + load(x + i + LANES);
  }
  for (; i < dim; i += LANES) a = a + load_some(x + i, dim - i < LANES ? (int)(dim - i) : LANES);
  return hsum(a + b);
}

inline float max_row(const float* x, int64_t dim) {  // NaN where the row has one
  vf largest = vset(-INFINITY);
  float best = -INFINITY;
  int64_t i = 0;
  for (; i + LANES <= dim; i += LANES) largest = vmax_nan(largest, load(x + i));
  float lanes[LANES];
  store(lanes, largest);
  for (int lane = 0; lane < LANES; lane++) best = best > lanes[lane] || best != best ? best : lanes[lane];
  for (; i < dim; i++) best = best > x[i] || best != best ? best : x[i];
  return best;
}

// in: x (..., D). out: one value per row. attrs: kind, keepdim.
void reduce(const pelton_call* c, pelton_team* team, int thread) {
  const pelton_tensor* x = c->in[0];
  float* out = (float*)c->out[0]->data;  // made by the plan: contiguous
  const int64_t dim = last_dim(x);
  const uint32_t kind = pelton_string_attr(c, 0);
  for (PELTON_EACH_CHUNK(team, rows_of(x), rows_per_claim(dim), lo, hi)) {
    for (int64_t r = lo; r < hi; r++) {
      const float* row = row_of(x, r);
      switch (kind) {
        case PELTON_STRING("max"): out[r] = max_row(row, dim); break;
        case PELTON_STRING("mean"): out[r] = sum_row(row, dim) / (float)dim; break;
        default: out[r] = sum_row(row, dim);
      }
    }
  }
}

// in: x (..., D).
void softmax(const pelton_call* c, pelton_team* team, int thread) {
  const pelton_tensor *x = c->in[0], *y = c->out[0];
  const int64_t dim = last_dim(x);
  for (PELTON_EACH_CHUNK(team, rows_of(x), rows_per_claim(dim), lo, hi)) {
    for (int64_t r = lo; r < hi; r++) {
      const float* a = row_of(x, r);
      float* o = row_of(y, r);
      const vf largest = vset(max_row(a, dim));
      each_vector(dim, [=](int64_t i, int n) { store_some(o + i, vexp(load_some(a + i, n) - largest), n); });
      const vf total = vset(sum_row(o, dim));
      each_vector(dim, [=](int64_t i, int n) { store_some(o + i, load_some(o + i, n) / total, n); });
    }
  }
}

}  // namespace

PELTON_KERNEL("cpu.reduce", PELTON_SIMD_LEVEL, reduce);
PELTON_KERNEL("cpu.softmax", PELTON_SIMD_LEVEL, softmax);
