// The plan runner: resolves a step's dynamic dimensions, then runs all instructions in one parallel
// region, with a barrier after each.
//
// Created once: kernels are found by name, operands get their addresses (but those of step inputs).
// Per step: the dynamic axes are filled in, the kernel of each instruction is chosen by the number
// of tokens, and the team runs. Nothing is allocated in a step.
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <new>

#include "pool.h"

namespace {

const int kItemBytes[] = {4, 2, 2, 4, 1, 1, 8, 1};  // by pelton_dtype

double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

template <class T>
struct Array {  // fixed size, zeroed, no exceptions
  T* data = nullptr;
  int64_t size = 0;
  ~Array() { free(data); }
  bool resize(int64_t n) {
    data = static_cast<T*>(calloc(n > 0 ? n : 1, sizeof(T)));
    size = n;
    return data != nullptr;
  }
  bool copy(const T* from, int64_t n) {
    if (!resize(n)) return false;
    if (n) memcpy(data, from, n * sizeof(T));
    return true;
  }
  T& operator[](int64_t i) { return data[i]; }
};

struct Choice {
  int64_t max_tokens;
  pelton_kernel kernel;
  const void* function;
};

struct DynamicAxis {
  int32_t operand, axis, dim;
};

struct InputOperand {
  int32_t operand, input;
  int64_t byte_offset;
};

}  // namespace

struct pelton_plan {
  Array<pelton_operand> operands;
  Array<pelton_tensor> tensors;  // by operand, resolved for the step
  Array<const pelton_tensor*> pointers;
  Array<pelton_instruction> instructions;
  Array<pelton_call> calls;
  Array<pelton_kernel> chosen;  // by instruction, for the step
  Array<Choice> choices;
  Array<double> attrs;
  Array<DynamicAxis> dynamic_axes;
  Array<InputOperand> input_operands;
  int64_t n_dynamic = 0, n_input_operands = 0;
  int32_t tokens_dim = 0;
  bool poison = false;
  char* arena = nullptr;
  void* workspace = nullptr;
  int64_t arena_bytes = 0;
  pelton_team* team = nullptr;

  // The step.
  const pelton_capture* captures = nullptr;
  int32_t n_captures = 0;
  double* seconds = nullptr;
  double start = 0;  // before any thread runs: one that comes late finds the others' work done

  ~pelton_plan() { pelton_team_destroy(team); }
};

namespace {

struct Failure {
  char* message;
  int64_t bytes;
  bool operator()(const char* format, ...) const __attribute__((format(printf, 2, 3))) {
    va_list args;
    va_start(args, format);
    if (message && bytes > 0) vsnprintf(message, bytes, format, args);
    va_end(args);
    return false;
  }
};

bool within(int64_t first, int64_t n, int64_t size) { return first >= 0 && n >= 0 && first + n <= size; }

bool resolve_operands(pelton_plan* p, const pelton_plan_desc* d, const Failure& fail) {
  for (int32_t i = 0; i < d->n_operands; i++) {
    const pelton_operand& o = d->operands[i];
    pelton_tensor& t = p->tensors[i];
    if (o.buffer < 0 || o.buffer >= d->n_buffers) return fail("operand %d names buffer %d of %d", i, o.buffer, d->n_buffers);
    if (o.ndim < 0 || o.ndim > PELTON_MAX_DIMS || o.dtype < 0 || o.dtype > PELTON_F8)
      return fail("operand %d has %d dimensions of dtype %d", i, o.ndim, o.dtype);
    t.dtype = o.dtype;
    t.ndim = o.ndim;
    memcpy(t.shape, o.shape, sizeof t.shape);
    memcpy(t.stride, o.stride, sizeof t.stride);
    for (int axis = 0; axis < o.ndim; axis++) {
      if (o.dim[axis] < 0) continue;
      if (o.dim[axis] >= d->n_dims) return fail("operand %d names dimension %d of %d", i, o.dim[axis], d->n_dims);
      p->dynamic_axes[p->n_dynamic++] = {i, axis, o.dim[axis]};
    }
    const pelton_buffer& b = d->buffers[o.buffer];
    switch (b.kind) {
      case PELTON_BUFFER_ARENA:
        if (b.offset < 0 || b.offset + o.byte_offset > d->arena_bytes)
          return fail("operand %d starts at byte %lld of an arena of %lld", i,
                      (long long)(b.offset + o.byte_offset), (long long)d->arena_bytes);
        t.data = p->arena + b.offset + o.byte_offset;
        break;
      case PELTON_BUFFER_INPUT:
        if (b.offset < 0 || b.offset >= d->n_inputs)
          return fail("operand %d names step input %lld of %d", i, (long long)b.offset, d->n_inputs);
        p->input_operands[p->n_input_operands++] = {i, (int32_t)b.offset, o.byte_offset};
        break;
      case PELTON_BUFFER_EXTERNAL:
        if (!b.data) return fail("buffer %d has no data", o.buffer);
        t.data = static_cast<char*>(b.data) + o.byte_offset;
        break;
      default: return fail("buffer %d is of unknown kind %d", o.buffer, b.kind);
    }
  }
  return true;
}

bool resolve_instructions(pelton_plan* p, const pelton_plan_desc* d, const Failure& fail) {
  for (int32_t i = 0; i < d->n_operand_index; i++) {
    const int32_t o = d->operand_index[i];
    if (o < -1 || o >= d->n_operands) return fail("an instruction names operand %d of %d", o, d->n_operands);
    p->pointers[i] = o < 0 ? nullptr : &p->tensors[o];
  }
  for (int32_t i = 0; i < d->n_choices; i++) {
    const pelton_choice& c = d->choices[i];
    if (c.kernel < 0 || c.kernel >= d->n_kernels) return fail("a choice names kernel %d of %d", c.kernel, d->n_kernels);
    const char* name = d->kernel_names[c.kernel];
    const void* function = d->kernel_functions[c.kernel];
    p->choices[i] = {c.max_tokens, pelton_find_kernel(name), function};
    if (!function != !!strncmp(name, "external.", 9)) return fail("the kernel %s and a function do not go together", name);
    if (!p->choices[i].kernel) return fail("the native library has no kernel %s for this CPU (%s)", name, pelton_cpu_level());
  }
  for (int32_t i = 0; i < d->n_instructions; i++) {
    const pelton_instruction& in = d->instructions[i];
    if (!within(in.first_operand, (int64_t)in.n_in + in.n_out, d->n_operand_index) ||
        !within(in.first_attr, in.n_attrs, d->n_attrs) ||
        !within(in.first_choice, in.n_choices, d->n_choices) || in.n_choices < 1)
      return fail("instruction %d has operands, attributes or tactics out of range", i);
    pelton_call& call = p->calls[i];
    call.in = &p->pointers[in.first_operand];
    call.out = call.in + in.n_in;
    call.attrs = &p->attrs[in.first_attr];
    call.workspace = p->workspace;
    call.workspace_bytes = d->workspace_bytes;
    call.n_in = in.n_in;
    call.n_out = in.n_out;
    call.n_attrs = in.n_attrs;
  }
  return true;
}

bool create(pelton_plan* p, const pelton_plan_desc* d, const Failure& fail) {
  p->arena = static_cast<char*>(d->arena);
  p->workspace = d->workspace;
  if (!p->operands.copy(d->operands, d->n_operands) || !p->tensors.resize(d->n_operands) ||
      !p->pointers.resize(d->n_operand_index) ||
      !p->instructions.copy(d->instructions, d->n_instructions) ||
      !p->calls.resize(d->n_instructions) || !p->chosen.resize(d->n_instructions) ||
      !p->choices.resize(d->n_choices) || !p->attrs.copy(d->attrs, d->n_attrs) ||
      !p->dynamic_axes.resize((int64_t)d->n_operands * PELTON_MAX_DIMS) ||
      !p->input_operands.resize(d->n_operands))
    return fail("out of memory");
  if (d->tokens_dim < 0 || d->tokens_dim >= d->n_dims)
    return fail("the dimension that chooses tactics is %d of %d", d->tokens_dim, d->n_dims);
  p->tokens_dim = d->tokens_dim;
  p->arena_bytes = d->arena_bytes;
  p->poison = d->poison;
  if (!resolve_operands(p, d, fail) || !resolve_instructions(p, d, fail)) return false;
  p->team = pelton_team_create(d->threads);
  return p->team || fail("cannot start %d threads", d->threads);
}

// Copies a view to contiguous memory, item by item where its last axis is strided.
void copy_contiguous(char* to, const pelton_tensor& t) {
  const int64_t item = kItemBytes[t.dtype];
  int64_t shape[PELTON_MAX_DIMS], stride[PELTON_MAX_DIMS];  // leading axes of 1 make it 4-D
  const int pad = PELTON_MAX_DIMS - t.ndim;
  for (int i = 0; i < PELTON_MAX_DIMS; i++) {
    shape[i] = i < pad ? 1 : t.shape[i - pad];
    stride[i] = i < pad ? 0 : t.stride[i - pad];
  }
  const bool whole_rows = stride[3] == 1;
  const int64_t bytes = whole_rows ? shape[3] * item : item, n = whole_rows ? 1 : shape[3];
  for (int64_t a = 0; a < shape[0]; a++)
    for (int64_t b = 0; b < shape[1]; b++)
      for (int64_t c = 0; c < shape[2]; c++)
        for (int64_t d = 0; d < n; d++, to += bytes)
          memcpy(to, static_cast<const char*>(t.data) + (a * stride[0] + b * stride[1] + c * stride[2] + d * stride[3]) * item, bytes);
}

void capture(pelton_plan* p, const pelton_capture*& next, int32_t after) {
  for (; next < p->captures + p->n_captures && next->after == after; next++) {
    copy_contiguous(static_cast<char*>(next->data), p->tensors[next->operand]);
  }
}

void step(void* arg, pelton_team* team, int thread) {
  pelton_plan* p = static_cast<pelton_plan*>(arg);
  const pelton_capture* next = p->captures;
  double before = 0;
  if (thread == 0) {
    capture(p, next, -1);
    before = p->start;
  }
  const int64_t n = p->instructions.size;
  for (int64_t i = 0; i < n; i++) {
    p->chosen[i](&p->calls[i], team, thread);
    if (i + 1 < n || p->seconds || p->n_captures) pelton_barrier(team, thread);  // else the region's
    if (pelton_team_stopped(team)) return;
    if (thread == 0) {
      if (p->seconds) {
        const double after = now();
        p->seconds[i] += after - before;
        before = after;
      }
      if (p->n_captures) capture(p, next, (int32_t)i);
    }
    // Nobody may overwrite what is being copied.
    if (p->n_captures) pelton_barrier(team, thread);
  }
}

struct OneKernel {
  pelton_kernel kernel;
  const pelton_call* call;
  int64_t repeat;
};

void one_kernel(void* arg, pelton_team* team, int thread) {
  OneKernel* one = static_cast<OneKernel*>(arg);
  for (int64_t i = 0; i < one->repeat; i++) {
    if (i) pelton_barrier(team, thread);
    one->kernel(one->call, team, thread);
  }
}

}  // namespace

extern "C" {

int pelton_run_kernel(pelton_team* team, pelton_kernel kernel, const pelton_call* call, int64_t repeat) {
  if (!kernel) return PELTON_ERROR_KERNEL;
  OneKernel one = {kernel, call, repeat};
  return pelton_team_run(team, one_kernel, &one);
}

pelton_plan* pelton_plan_create(const pelton_plan_desc* desc, char* message, int64_t message_bytes) {
  pelton_plan* plan = new (std::nothrow) pelton_plan;
  const Failure fail = {message, message_bytes};
  if (!plan) {
    fail("out of memory");
    return nullptr;
  }
  if (create(plan, desc, fail)) return plan;
  delete plan;
  return nullptr;
}

void pelton_plan_destroy(pelton_plan* plan) { delete plan; }

int pelton_plan_run(pelton_plan* p, const int64_t* dims, void* const* inputs,
                    const pelton_capture* captures, int32_t n_captures, double* seconds) {
  for (int64_t i = 0; i < p->n_dynamic; i++) {
    const DynamicAxis& a = p->dynamic_axes[i];
    p->tensors[a.operand].shape[a.axis] = dims[a.dim];
  }
  for (int64_t i = 0; i < p->n_input_operands; i++) {
    const InputOperand& o = p->input_operands[i];
    p->tensors[o.operand].data = static_cast<char*>(inputs[o.input]) + o.byte_offset;
  }
  const int64_t tokens = dims[p->tokens_dim];
  for (int64_t i = 0; i < p->instructions.size; i++) {
    const pelton_instruction& in = p->instructions[i];
    const Choice* choice = &p->choices[in.first_choice];
    const Choice* last = choice + in.n_choices - 1;
    while (choice < last && choice->max_tokens < tokens) choice++;
    if (choice->max_tokens < tokens) return PELTON_ERROR_PLAN;
    p->chosen[i] = choice->kernel;
    p->calls[i].function = choice->function;
  }
  if (p->poison) memset(p->arena, 0xff, p->arena_bytes);
  p->captures = captures;
  p->n_captures = n_captures;
  p->seconds = seconds;
  if (seconds) p->start = now();
  return pelton_team_run(p->team, step, p);
}

}  // extern "C"
