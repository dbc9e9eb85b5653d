// The passes over a whole vocabulary that sampling needs, compiled per ISA level.
#pragma once
#include <stdint.h>

typedef struct pelton_sample_loops {
  // out = in with NaN as -infinity; returns the largest.
  float (*clean)(const float* in, float* out, int64_t n);
  // w = exp((l - top) / t), by the exponential of sampling/reference.py.
  void (*weights)(const float* l, float* w, int64_t n, float top, float t);
  // Sum of w[0 .. n), n <= 1024: 16 interleaved float64 sums, added in order.
  double (*block_sum)(const float* w, int64_t n);
  // Number of l[i] > v.
  int64_t (*count_above)(const float* l, int64_t n, float v);
  // Appends to `out` the indices of all l[i] >= v, in order; returns how many.
  int64_t (*at_least)(const float* l, int64_t n, float v, int32_t* out);
} pelton_sample_loops;

extern "C" const pelton_sample_loops pelton_sample_loops_generic;
extern "C" const pelton_sample_loops pelton_sample_loops_avx2;
