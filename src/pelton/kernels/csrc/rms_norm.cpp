// rms_norm, baseline: y = x / sqrt(mean(x^2) + eps) * weight over the last axis.
#include <math.h>

#include "kernel_util.h"

namespace {

// in: x (T, D) or (T, heads, D), weight (D). attrs: eps.
void rms_norm(const pelton_call* c, pelton_team* team, int thread) {
  const pelton_tensor *x = c->in[0], *w = c->in[1], *y = c->out[0];
  const int64_t dim = x->shape[x->ndim - 1], heads = x->ndim == 3 ? x->shape[1] : 1;
  const int64_t head_stride = x->ndim == 3 ? x->stride[1] : 0, y_head_stride = y->ndim == 3 ? y->stride[1] : 0;
  const float eps = (float)pelton_attr(c, 0, 0);
  const float* weight = (const float*)w->data;
  for (PELTON_EACH_CHUNK(team, x->shape[0], 4, lo, hi)) {
    for (int64_t t = lo; t < hi; t++) {
      for (int64_t h = 0; h < heads; h++) {
        const float* a = pelton_row_f32(x, t) + h * head_stride;
        float* o = pelton_row_f32(y, t) + h * y_head_stride;
        float sum = 0;
        for (int64_t i = 0; i < dim; i++) sum += a[i] * a[i];
        const float scale = 1.0f / sqrtf(sum / (float)dim + eps);
        for (int64_t i = 0; i < dim; i++) o[i] = a[i] * scale * weight[i];
      }
    }
  }
}

}  // namespace

PELTON_KERNEL("cpu.rms_norm", PELTON_GENERIC, rms_norm);
