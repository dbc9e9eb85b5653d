// The C ABI of Pelton's native library: a plan runner, its thread pool and CPU kernels.
// Plain C types, no torch headers, no exceptions across the boundary.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "pelton_kernel.h"  // tensors

#define PELTON_EXPORT __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

// Raised with every incompatible change; an engine and a library must agree.
#define PELTON_ABI_VERSION 2
#define PELTON_MAX_HEAD_DIM 512  // of attention kernels; their tactics refuse larger heads

typedef struct pelton_team pelton_team;  // the threads that run a step together

// One kernel invocation. Every thread of the team calls the kernel with the same call and its own
// thread index; the kernel splits the work with pelton_claim and joins phases with pelton_barrier.
// The runner puts a barrier after every kernel, so a kernel need not end with one.
typedef struct pelton_call {
  const pelton_tensor* const* in;  // n_in pointers, NULL: an absent optional input
  const pelton_tensor* const* out;
  const double* attrs;  // non-tensor arguments in the schema's order; a string as PELTON_STRING(it)
  void* workspace;      // shared scratch, 64-byte aligned
  int64_t workspace_bytes;
  int32_t n_in, n_out, n_attrs;
  const void* function;  // what the kernels external.* call; NULL for all others
} pelton_call;

// Of the host program, behind external.host: 0, or the step fails with PELTON_ERROR_HOST.
typedef int (*pelton_host_function)(const pelton_call* call);

typedef void (*pelton_kernel)(const pelton_call* call, pelton_team* team, int thread);

// Next index of [0, n) for this phase, or -1 when none is left. All threads of a phase pass the
// same n; a phase ends at a barrier. One claim is one atomic add: make chunks worth a microsecond.
int64_t pelton_claim(pelton_team* team, int64_t n);
void pelton_barrier(pelton_team* team, int thread);
int pelton_team_size(const pelton_team* team);
// This thread's own scratch of PELTON_SCRATCH_BYTES, 64-byte aligned; contents do not survive.
#define PELTON_SCRATCH_BYTES (1 << 20)
void* pelton_scratch(pelton_team* team, int thread);

// ---- What the CPU can do, and which kernels there are ------------------------------------------

// ISA levels in order of preference; the suffix of a source file is its level's name.
// A CPU has a set of them, and a kernel runs at the highest one it was compiled for in that set.
typedef enum pelton_level {
  PELTON_GENERIC = 0,
  PELTON_AVX2 = 1,     // AVX2, FMA, F16C, BMI2
  PELTON_AVXVNNI = 2,  // AVX2 and AVX-VNNI (VEX encoded, 256 bits)
  PELTON_AVX512 = 3,   // AVX512 F, BW, VL, DQ, VNNI
  PELTON_AVX512BF16 = 4,
  PELTON_LEVELS = 5,
} pelton_level;

PELTON_EXPORT int pelton_abi_version(void);
// Name of the highest level in use. The environment variable PELTON_CPU_LEVEL (a name) caps it; it
// is read once and is meant for tests.
PELTON_EXPORT const char* pelton_cpu_level(void);
PELTON_EXPORT const char* pelton_level_name(int level);  // NULL: no such level
PELTON_EXPORT int pelton_has_level(int level);           // 1 when this CPU (under the cap) has it

// The table of kernels, one row per (name, level): 0 while i is below their number.
PELTON_EXPORT int pelton_kernel_info(int i, const char** name, int* level);
// Best version for this CPU, NULL when there is none. `_at`: exactly that level's version.
PELTON_EXPORT pelton_kernel pelton_find_kernel(const char* name);
PELTON_EXPORT pelton_kernel pelton_find_kernel_at(const char* name, int level);

// ---- Teams --------------------------------------------------------------------------------------

// A team of n threads including the caller (n - 1 are started; they sleep when idle). NULL when
// threads cannot be started. Teams are independent of one another. After fork() the child has no
// such threads: there, running returns PELTON_ERROR_FORKED, and destroying only frees memory.
PELTON_EXPORT pelton_team* pelton_team_create(int n);
PELTON_EXPORT void pelton_team_destroy(pelton_team* team);

enum {
  PELTON_OK = 0,
  PELTON_ERROR_BUSY = 1,    // the team or plan is running in another thread
  PELTON_ERROR_FORKED = 2,  // the process forked after the team was created
  PELTON_ERROR_KERNEL = 3,  // no such kernel
  PELTON_ERROR_PLAN = 4,    // the plan or the step is inconsistent
  PELTON_ERROR_MEMORY = 5,
  PELTON_ERROR_HOST = 6,  // a function of the host failed; the rest of the step was left out
};

// Run one kernel on a team `repeat` times, a barrier after each (to time it, else 1).
PELTON_EXPORT int pelton_run_kernel(pelton_team* team, pelton_kernel kernel, const pelton_call* call,
                                    int64_t repeat);

// ---- Sampling (sampling/reference.py states the rules) -------------------------------------------

// A token for each of n rows of float32 logits (`stride` in elements between rows), and its
// log-probability (`logprobs` may be NULL). PELTON_OK or PELTON_ERROR_MEMORY.
PELTON_EXPORT int pelton_sample(const float* logits, int64_t stride, int64_t n, int64_t vocab,
                                const float* temperature, const int32_t* top_k, const float* top_p,
                                const float* min_p, const uint64_t* seed, const int64_t* position,
                                int32_t* tokens, float* logprobs);
// Log-probability and rank of each row's chosen token, and the k <= vocab most likely tokens of each
// row with theirs (n x k).
PELTON_EXPORT int pelton_log_softmax_topk(const float* logits, int64_t stride, int64_t n,
                                          int64_t vocab, const int32_t* chosen, int64_t k,
                                          float* chosen_logprobs, int32_t* ranks, int32_t* ids,
                                          float* logprobs);

// ---- Plans --------------------------------------------------------------------------------------

typedef enum pelton_buffer_kind {
  PELTON_BUFFER_ARENA = 0,     // `offset` bytes into the plan's arena
  PELTON_BUFFER_INPUT = 1,     // step input number `offset`
  PELTON_BUFFER_EXTERNAL = 2,  // `data`: weights, constants, caches; owned by the caller
} pelton_buffer_kind;

typedef struct pelton_buffer {
  int64_t offset;
  void* data;
  int32_t kind;
  int32_t reserved;
} pelton_buffer;

typedef struct pelton_operand {
  int64_t shape[PELTON_MAX_DIMS];
  int64_t stride[PELTON_MAX_DIMS];
  int64_t byte_offset;           // from the buffer's start
  int32_t dim[PELTON_MAX_DIMS];  // per axis, index of the dynamic dimension or -1: `shape` holds it
  int32_t buffer;
  int32_t dtype;
  int32_t ndim;
  int32_t reserved;
} pelton_operand;

// Ranges into pelton_plan_desc's flat arrays.
typedef struct pelton_instruction {
  int32_t first_operand, n_in, n_out;  // operand_index[first_operand ...]: inputs, then outputs
  int32_t first_attr, n_attrs;
  int32_t first_choice, n_choices;
  int32_t reserved;
} pelton_instruction;

typedef struct pelton_choice {
  int64_t max_tokens;
  int32_t kernel;  // index into kernel_names
  int32_t reserved;
} pelton_choice;

typedef struct pelton_plan_desc {
  const pelton_buffer* buffers;
  const pelton_operand* operands;
  const pelton_instruction* instructions;
  const int32_t* operand_index;  // -1: absent optional input
  const double* attrs;
  const pelton_choice* choices;
  const char* const* kernel_names;
  const void* const* kernel_functions;  // by kernel: `function` of its calls, or NULL
  void* arena;      // 64-byte aligned
  void* workspace;  // 64-byte aligned
  int64_t arena_bytes, workspace_bytes;
  int32_t n_buffers, n_operands, n_instructions, n_operand_index;
  int32_t n_attrs, n_choices, n_kernels, n_dims;
  int32_t n_inputs;
  int32_t tokens_dim;  // index of the dimension that chooses among tactics
  int32_t threads;
  int32_t poison;  // 1: fill the arena with NaN before each step (tests)
} pelton_plan_desc;

// Copy operand `operand` (rows made contiguous) to `data` after instruction `after` (-1: first).
typedef struct pelton_capture {
  void* data;
  int32_t operand;
  int32_t after;
} pelton_capture;

typedef struct pelton_plan pelton_plan;

// The description is copied; the memory it points to (arena, weights, caches) is borrowed. NULL and a sentence in
// `message` when it is inconsistent.
PELTON_EXPORT pelton_plan* pelton_plan_create(const pelton_plan_desc* desc, char* message,
                                              int64_t message_bytes);
PELTON_EXPORT void pelton_plan_destroy(pelton_plan* plan);

// Run one step. `dims` has n_dims values, `inputs` n_inputs pointers; captures are sorted by
// `after`. `seconds` (NULL or one per instruction): the time each took is added to it.
PELTON_EXPORT int pelton_plan_run(pelton_plan* plan, const int64_t* dims, void* const* inputs,
                                  const pelton_capture* captures, int32_t n_captures,
                                  double* seconds);
#ifdef __cplusplus
}
#endif
