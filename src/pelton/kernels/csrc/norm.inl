// rms_norm, add_rms_norm, layer_norm: one row at a time, rows shared out among the threads.
#include "norm.h"

namespace {

// in: x (T, [heads,] D), weight (D). attrs: eps.
void rms_norm(const pelton_call* c, pelton_team* team, int thread) {
  const pelton_tensor *x = c->in[0], *y = c->out[0];
  const int64_t dim = last_dim(x), rows = rows_of(x);
  const float* weight = (const float*)c->in[1]->data;
  const float eps = (float)pelton_attr(c, 0, 0);
  for (PELTON_EACH_CHUNK(team, rows, chunk_of(dim), lo, hi))
    for (int64_t r = lo; r < hi; r++)
      scale_row(row_of(x, r), weight, rms_scale(row_of(x, r), dim, eps), row_of(y, r), dim);
}

// in: x, residual (T, D), weight (D). out: norm(x + residual), x + residual. attrs: eps.
void add_rms_norm(const pelton_call* c, pelton_team* team, int thread) {
  const pelton_tensor *x = c->in[0], *residual = c->in[1], *y = c->out[0], *total = c->out[1];
  const int64_t dim = last_dim(x), rows = rows_of(x);
  const float* weight = (const float*)c->in[2]->data;
  const float eps = (float)pelton_attr(c, 0, 0);
  for (PELTON_EACH_CHUNK(team, rows, chunk_of(dim), lo, hi)) {
    for (int64_t r = lo; r < hi; r++) {
      const float *a = row_of(x, r), *b = row_of(residual, r);
      float* sum = row_of(total, r);
      add_row(a, b, sum, dim);
      scale_row(sum, weight, rms_scale(sum, dim, eps), row_of(y, r), dim);
    }
  }
}

// in: x (T, [heads,] D), [weight (D), bias (D)]. attrs: eps.
void layer_norm(const pelton_call* c, pelton_team* team, int thread) {
  const pelton_tensor *x = c->in[0], *y = c->out[0];
  const int64_t dim = last_dim(x), rows = rows_of(x);
  const pelton_tensor *given_weight = pelton_in(c, 1), *given_bias = pelton_in(c, 2);
  const float* weight = given_weight ? (const float*)given_weight->data : NULL;
  const float* bias = given_bias ? (const float*)given_bias->data : NULL;
  const float eps = (float)pelton_attr(c, 0, 0);
  for (PELTON_EACH_CHUNK(team, rows, chunk_of(dim), lo, hi)) {
    for (int64_t r = lo; r < hi; r++) {
      const float* a = row_of(x, r);
      float* o = row_of(y, r);
      vf sum = vset(0);
      each_vector(dim, [&](int64_t i, int n) { sum = sum + load_some(a + i, n); });
      const vf mean = vset(hsum(sum) / (float)dim);
      each_vector(dim, [=](int64_t i, int n) { store_some(o + i, load_some(a + i, n) - mean, n); });
      const vf scale = vset(rms_scale(o, dim, eps));
      each_vector(dim, [=](int64_t i, int n) {
        const vf w = weight ? load_some(weight + i, n) : vset(1.0f);
        store_some(o + i, vfma(load_some(o + i, n) * scale, w, bias ? load_some(bias + i, n) : vset(0.0f)), n);
      });
    }
  }
}

}  // namespace

PELTON_KERNEL("cpu.rms_norm", PELTON_SIMD_LEVEL, rms_norm);
PELTON_KERNEL("cpu.add_rms_norm", PELTON_SIMD_LEVEL, add_rms_norm);
PELTON_KERNEL("cpu.layer_norm", PELTON_SIMD_LEVEL, layer_norm);
