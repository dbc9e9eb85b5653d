// quantize_q8, rms_norm_q8, add_rms_norm_q8: rows that int8 products read, made once by what produces them.
#include "norm.h"
#include "quantise.h"

namespace {

inline uint8_t* quantised_row(const pelton_tensor* t, int64_t row) {
  return (uint8_t*)t->data + row * t->stride[0];
}

// in: x (T, K), K a multiple of 32. out: uint8 (T, K / 32 * 44).
void quantize_q8(const pelton_call* c, pelton_team* team, int thread) {
  const pelton_tensor *x = c->in[0], *y = c->out[0];
  const int64_t dim = x->shape[1];
  for (PELTON_EACH_CHUNK(team, x->shape[0], chunk_of(dim), lo, hi))
    for (int64_t r = lo; r < hi; r++) quantise_row(pelton_row_f32(x, r), dim / 32, quantised_row(y, r));
}

// in: x (T, D), weight (D); D a multiple of 32 that a thread's scratch holds. out: uint8. attrs: eps.
void rms_norm_q8(const pelton_call* c, pelton_team* team, int thread) {
  const pelton_tensor *x = c->in[0], *y = c->out[0];
  const int64_t dim = x->shape[1];
  const float* weight = (const float*)c->in[1]->data;
  const float eps = (float)pelton_attr(c, 0, 0);
  float* normed = (float*)pelton_scratch(team, thread);
  for (PELTON_EACH_CHUNK(team, x->shape[0], chunk_of(dim), lo, hi)) {
    for (int64_t r = lo; r < hi; r++) {
      const float* a = pelton_row_f32(x, r);
      scale_row(a, weight, rms_scale(a, dim, eps), normed, dim);
      quantise_row(normed, dim / 32, quantised_row(y, r));
    }
  }
}

// in: x, residual (T, D), weight (D). out: uint8 of norm(x + residual), x + residual. attrs: eps.
void add_rms_norm_q8(const pelton_call* c, pelton_team* team, int thread) {
  const pelton_tensor *x = c->in[0], *residual = c->in[1], *y = c->out[0], *total = c->out[1];
  const int64_t dim = x->shape[1];
  const float* weight = (const float*)c->in[2]->data;
  const float eps = (float)pelton_attr(c, 0, 0);
  float* normed = (float*)pelton_scratch(team, thread);
  for (PELTON_EACH_CHUNK(team, x->shape[0], chunk_of(dim), lo, hi)) {
    for (int64_t r = lo; r < hi; r++) {
      float* sum = pelton_row_f32(total, r);
      add_row(pelton_row_f32(x, r), pelton_row_f32(residual, r), sum, dim);
      scale_row(sum, weight, rms_scale(sum, dim, eps), normed, dim);
      quantise_row(normed, dim / 32, quantised_row(y, r));
    }
  }
}

}  // namespace

PELTON_KERNEL("cpu.quantize_q8", PELTON_SIMD_LEVEL, quantize_q8);
PELTON_KERNEL("cpu.rms_norm_q8", PELTON_SIMD_LEVEL, rms_norm_q8);
PELTON_KERNEL("cpu.add_rms_norm_q8", PELTON_SIMD_LEVEL, add_rms_norm_q8);
