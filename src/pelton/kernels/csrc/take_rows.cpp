// take_rows: out[i] = x[index[i]].
#include "kernel_util.h"

namespace {

// in: x (T, H), index (N) int32.
void take_rows(const pelton_call* c, pelton_team* team, int thread) {
  const pelton_tensor *x = c->in[0], *index = c->in[1], *y = c->out[0];
  for (PELTON_EACH_CHUNK(team, index->shape[0], 4, lo, hi))
    for (int64_t i = lo; i < hi; i++)
      memcpy(pelton_row_f32(y, i), pelton_row_f32(x, *pelton_row_i32(index, i)),
             (size_t)x->shape[1] * sizeof(float));
}

}  // namespace

PELTON_KERNEL("cpu.take_rows", PELTON_GENERIC, take_rows);
