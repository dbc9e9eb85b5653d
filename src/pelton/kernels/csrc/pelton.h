// The C ABI of Pelton's native library: a plan runner, its thread pool and CPU kernels.
// Plain C types, no torch headers, no exceptions across the boundary.
#pragma once
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Raised with every incompatible change; an engine and a library must agree.
#define PELTON_ABI_VERSION 1
#define PELTON_MAX_DIMS 4

typedef enum pelton_dtype {
  PELTON_F32 = 0, PELTON_BF16 = 1, PELTON_F16 = 2, PELTON_I32 = 3,
  PELTON_I8 = 4, PELTON_U8 = 5, PELTON_I64 = 6,
} pelton_dtype;

// A strided view. For packed weights (PELTON_U8) shape is the logical (rows, cols) and strides are
// meaningless: the kernel knows its layout.
typedef struct pelton_tensor {
  void* data;
  int32_t dtype;
  int32_t ndim;
  int64_t shape[PELTON_MAX_DIMS];
  int64_t stride[PELTON_MAX_DIMS];  // in elements
} pelton_tensor;

typedef struct pelton_team pelton_team;  // the threads that run a step together

// One kernel invocation. Every thread of the team calls the kernel with the same call and its own
// thread index; the kernel splits the work with pelton_claim and joins phases with pelton_barrier.
// The runner puts a barrier after every kernel, so a kernel need not end with one.
typedef struct pelton_call {
  const pelton_tensor* const* in;  // n_in pointers, NULL: an absent optional input
  const pelton_tensor* const* out;
  const double* attrs;             // numbers in the schema's order; strings as the kernel's codes
  void* workspace;                 // shared scratch, 64-byte aligned
  int64_t workspace_bytes;
  int32_t n_in, n_out, n_attrs;
} pelton_call;

typedef void (*pelton_kernel)(const pelton_call* call, pelton_team* team, int thread);

// Next chunk of [0, n) for this phase, or -1 when none is left. All threads of a phase pass the
// same n; a phase ends at a barrier.
int64_t pelton_claim(pelton_team* team, int64_t n);
void pelton_barrier(pelton_team* team, int thread);
int pelton_team_size(const pelton_team* team);

// Kernels register under their tactic's name in a table (kernel_table.cpp).
pelton_kernel pelton_find_kernel(const char* name);

#ifdef __cplusplus
}
#endif
