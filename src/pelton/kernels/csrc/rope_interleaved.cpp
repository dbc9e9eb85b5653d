// rope_interleaved: rotation of neighbouring pairs.
#include "kernel_util.h"

namespace {

// in: x (T, heads, D), cos_sin (T, R) = [cos, sin].
void rope_interleaved(const pelton_call* c, pelton_team* team, int thread) {
  const pelton_tensor *x = c->in[0], *cos_sin = c->in[1], *y = c->out[0];
  const int64_t heads = x->shape[1], dim = x->shape[2], half = cos_sin->shape[1] / 2;
  for (PELTON_EACH_CHUNK(team, x->shape[0], 4, lo, hi)) {
    for (int64_t t = lo; t < hi; t++) {
      const float *cos = pelton_row_f32(cos_sin, t), *sin = cos + half;
      for (int64_t h = 0; h < heads; h++) {
        const float* a = pelton_row_f32(x, t) + h * x->stride[1];
        float* o = pelton_row_f32(y, t) + h * y->stride[1];
        for (int64_t i = 0; i < half; i++) {
          o[2 * i] = a[2 * i] * cos[i] - a[2 * i + 1] * sin[i];
          o[2 * i + 1] = a[2 * i + 1] * cos[i] + a[2 * i] * sin[i];
        }
        for (int64_t i = 2 * half; i < dim; i++) o[i] = a[i];
      }
    }
  }
}

}  // namespace

PELTON_KERNEL("cpu.rope_interleaved", PELTON_GENERIC, rope_interleaved);
