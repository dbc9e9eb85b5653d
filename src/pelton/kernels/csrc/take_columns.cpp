// take_columns: y[t][i] = x[t][order[i]].
#include "kernel_util.h"

namespace {

// in: x (T, K), order (K) whole numbers as float32; one that is no column gives 0.
void take_columns(const pelton_call* c, pelton_team* team, int thread) {
  const pelton_tensor *x = c->in[0], *y = c->out[0];
  const float* order = (const float*)c->in[1]->data;
  const int64_t k = x->shape[1];
  for (PELTON_EACH_CHUNK(team, x->shape[0], 1, lo, hi))
    for (int64_t t = lo; t < hi; t++) {
      const float* from = pelton_row_f32(x, t);
      float* to = pelton_row_f32(y, t);
      for (int64_t i = 0; i < k; i++) {
        const int64_t j = (int64_t)order[i];
        to[i] = j >= 0 && j < k ? from[j] : 0.0f;
      }
    }
}

}  // namespace

PELTON_KERNEL("cpu.take_columns", PELTON_GENERIC, take_columns);
