// What a C kernel from outside Pelton needs (docs/extending.md). Plain C11, nothing to link with.
//
// A kernel computes one call of an op. It is called by every thread of the step at the same time, and
// each does its share:
//
//     #include "pelton_kernel.h"
//     void double_it(const pelton_kernel_args* a) {
//       int64_t first, last, n = pelton_last_dim(a->in[0]);
//       pelton_share(a, pelton_rows(a->in[0]), &first, &last);
//       for (int64_t r = first; r < last; r++)
//         for (int64_t i = 0; i < n; i++)
//           pelton_row(a->out[0], r)[i] = 2 * pelton_row(a->in[0], r)[i];
//     }
//
// It may not keep pointers, nor write anything but its outputs and its workspace.
#ifndef PELTON_KERNEL_H
#define PELTON_KERNEL_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define PELTON_MAX_DIMS 4

typedef enum pelton_dtype {
  PELTON_F32 = 0, PELTON_BF16 = 1, PELTON_F16 = 2, PELTON_I32 = 3,
  PELTON_I8 = 4, PELTON_U8 = 5, PELTON_I64 = 6, PELTON_F8 = 7,  // F8: e4m3, no infinities
} pelton_dtype;

// A strided view. Operands' last axis has stride 1, but for ops that take any strides. For packed
// weights (PELTON_U8) shape is the logical (rows, cols) and strides are meaningless.
typedef struct pelton_tensor {
  void* data;
  int32_t dtype;
  int32_t ndim;
  int64_t shape[PELTON_MAX_DIMS];
  int64_t stride[PELTON_MAX_DIMS];  // in elements
} pelton_tensor;

typedef struct pelton_kernel_args {
  const pelton_tensor* const* in;   // n_in, in the schema's order; NULL: an absent optional input
  const pelton_tensor* const* out;  // n_out
  const double* attrs;  // n_attrs: the other arguments in the schema's order; a string is its hash
  void* workspace;      // shared by the threads, 64-byte aligned, contents undefined
  int64_t workspace_bytes;
  int32_t n_in, n_out, n_attrs;
  int32_t thread, threads;  // this thread's number, and how many there are
} pelton_kernel_args;

typedef void (*pelton_external_kernel)(const pelton_kernel_args* args);

// This thread's rows of n: [*first, *last).
static inline void pelton_share(const pelton_kernel_args* args, int64_t n, int64_t* first, int64_t* last) {
  *first = n * args->thread / args->threads;
  *last = n * (args->thread + 1) / args->threads;
}

// A tensor as rows of its last axis, whatever the strides of the others.
static inline int64_t pelton_last_dim(const pelton_tensor* t) { return t->ndim ? t->shape[t->ndim - 1] : 1; }
static inline int64_t pelton_rows(const pelton_tensor* t) {
  int64_t n = 1;
  for (int i = 0; i + 1 < t->ndim; i++) n *= t->shape[i];
  return n;
}
static inline float* pelton_row(const pelton_tensor* t, int64_t row) {  // of a float32 tensor
  int64_t offset = 0;
  for (int i = t->ndim - 2; i >= 0; i--) {
    offset += row % t->shape[i] * t->stride[i];
    row /= t->shape[i];
  }
  return (float*)t->data + offset;
}

#ifdef __cplusplus
}
#endif
#endif  // PELTON_KERNEL_H
