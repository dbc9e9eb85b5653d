// Rows of the norms: sums of squares and scaling.
#pragma once
#include "simd.h"

namespace {

// Rows per claim: about a microsecond of work.
inline int64_t chunk_of(int64_t dim) { return 4096 / (dim > 0 ? dim : 1) + 1; }

inline float sum_squares(const float* x, int64_t dim) {
  vf a = vset(0), b = vset(0);
  int64_t i = 0;
  for (; i + 2 * LANES <= dim; i += 2 * LANES) {
    const vf u = load(x + i), v = load(x + i + LANES);
    a = vfma(u, u, a);
    b = vfma(v, v, b);
  }
  for (; i < dim; i += LANES) {
    const vf u = load_some(x + i, dim - i < LANES ? (int)(dim - i) : LANES);
    a = vfma(u, u, a);
  }
  return hsum(a + b);
}

inline void scale_row(const float* x, const float* weight, float scale, float* y, int64_t dim) {
  const vf s = vset(scale);
  each_vector(dim, [=](int64_t i, int n) {
    store_some(y + i, load_some(x + i, n) * s * load_some(weight + i, n), n);
  });
}

inline float rms_scale(const float* x, int64_t dim, float eps) {
  return 1.0f / sqrtf(sum_squares(x, dim) / (float)dim + eps);
}

inline void add_row(const float* a, const float* b, float* sum, int64_t dim) {
  each_vector(dim, [=](int64_t i, int n) {
    store_some(sum + i, load_some(a + i, n) + load_some(b + i, n), n);
  });
}

}  // namespace
