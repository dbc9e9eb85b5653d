// copy: a view of any strides into contiguous memory, item by item.
#include "kernel_util.h"

namespace {

template <class T>
void copy_rows(const pelton_tensor* x, const pelton_tensor* y, pelton_team* team) {
  const int last = x->ndim - 1;
  const int64_t dim = x->shape[last], stride = x->stride[last];
  int64_t rows = 1;
  for (int i = 0; i < last; i++) rows *= x->shape[i];
  for (PELTON_EACH_CHUNK(team, rows, 2048 / (dim > 0 ? dim : 1) + 1, lo, hi)) {
    for (int64_t r = lo; r < hi; r++) {
      const T* from = (const T*)x->data;
      int64_t rest = r;
      for (int i = last - 1; i >= 0; i--) {
        from += rest % x->shape[i] * x->stride[i];
        rest /= x->shape[i];
      }
      T* to = (T*)y->data + r * dim;  // made by the plan: contiguous
      for (int64_t i = 0; i < dim; i++) to[i] = from[i * stride];
    }
  }
}

// in: x (at least one axis).
void copy(const pelton_call* c, pelton_team* team, int thread) {
  const pelton_tensor *x = c->in[0], *y = c->out[0];
  switch (x->dtype) {
    case PELTON_F32:
    case PELTON_I32: return copy_rows<uint32_t>(x, y, team);
    case PELTON_BF16:
    case PELTON_F16: return copy_rows<uint16_t>(x, y, team);
    case PELTON_I64: return copy_rows<uint64_t>(x, y, team);
    default: return copy_rows<uint8_t>(x, y, team);
  }
}

}  // namespace

PELTON_KERNEL("cpu.copy", PELTON_GENERIC, copy);
