// Stress of the thread pool and of the kernels' memory accesses, for ASan/UBSan and TSan:
//   cmake -S . -B build/asan -DPELTON_SANITIZE=address && cmake --build build/asan --target native_stress
// Buffers are exactly as large as their tensors, so that any access beyond one is reported.
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernel_util.h"
#include "pool.h"

namespace {

#define CHECK(condition)                                                     \
  do {                                                                       \
    if (!(condition)) {                                                      \
      fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);        \
      exit(1);                                                               \
    }                                                                        \
  } while (0)

struct Random {
  uint64_t state;
  uint32_t next() {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(state >> 33);
  }
  int64_t below(int64_t n) { return next() % n; }
  int64_t pick(const int64_t* values, int n) { return values[below(n)]; }
  float value() { return (float)(next() % 2001) / 500.0f - 2.0f; }
};

// ---- The pool -------------------------------------------------------------------------------------

struct Phases {
  int phases;
  int64_t items;
  int64_t* sums;  // by phase; plain memory, so that TSan sees a missing barrier
  int64_t* seen;  // by item: the phase that last took it
};

void phases(void* arg, pelton_team* team, int thread) {
  Phases* w = static_cast<Phases*>(arg);
  for (int p = 0; p < w->phases; p++) {
    for (int64_t i; (i = pelton_claim(team, w->items)) >= 0;) {
      CHECK(w->seen[i] == p);  // each item once a phase
      w->seen[i] = p + 1;
    }
    pelton_barrier(team, thread);
    if (thread == p % pelton_team_size(team)) {
      w->sums[p] = 0;
      for (int64_t i = 0; i < w->items; i++) w->sums[p] += w->seen[i];
    }
    pelton_barrier(team, thread);
    CHECK(w->sums[p] == w->items * (p + 1));
  }
}

void stress_pool(uint64_t seed, int rounds) {
  Random random = {seed};
  for (int round = 0; round < rounds; round++) {
    const int threads = 1 + (int)random.below(5);
    pelton_team* team = pelton_team_create(threads);
    CHECK(team);
    const int regions = (int)random.below(60);
    for (int r = 0; r < regions; r++) {
      const int n_phases = 1 + (int)random.below(6);
      const int64_t items = random.below(20);
      int64_t* sums = static_cast<int64_t*>(calloc(n_phases, sizeof(int64_t)));
      int64_t* seen = static_cast<int64_t*>(calloc(items + 1, sizeof(int64_t)));
      Phases w = {n_phases, items, sums, seen};
      CHECK(pelton_team_run(team, phases, &w) == PELTON_OK);
      free(sums);
      free(seen);
      if (random.below(40) == 0) usleep(300);  // long enough for the workers to fall asleep
    }
    pelton_team_destroy(team);
  }
}

void* stress_pool_thread(void* seed) {
  stress_pool(reinterpret_cast<uintptr_t>(seed), 25);
  return nullptr;
}

// ---- Kernels on exact buffers ---------------------------------------------------------------------

struct Operand {
  pelton_tensor t;
  Operand(int dtype, int ndim, int64_t a, int64_t b = 1, int64_t c = 1, int64_t d = 1) {
    const int64_t shape[4] = {a, b, c, d};
    memset(&t, 0, sizeof t);
    t.dtype = dtype;
    t.ndim = ndim;
    int64_t n = 1;
    for (int i = ndim - 1; i >= 0; i--) {
      t.shape[i] = shape[i];
      t.stride[i] = n;
      n *= shape[i];
    }
    const int64_t bytes = n * (dtype == PELTON_F32 || dtype == PELTON_I32 ? 4 : 2);
    t.data = malloc(bytes ? bytes : 1);
    memset(t.data, 0xff, bytes);  // NaN
  }
  ~Operand() { free(t.data); }
  Operand(const Operand&) = delete;
  int64_t size() const {
    int64_t n = 1;
    for (int i = 0; i < t.ndim; i++) n *= t.shape[i];
    return n;
  }
  int32_t* ints() { return static_cast<int32_t*>(t.data); }
  Operand& fill(Random& random) {
    for (int64_t i = 0; i < size(); i++) pelton_store(t.data, t.dtype, i, random.value());
    return *this;
  }
  void check_finite() const {
    for (int64_t i = 0; i < size(); i++) CHECK(isfinite(pelton_load(t.data, t.dtype, i)));
  }
};

struct Call {
  const pelton_tensor* in[10];
  const pelton_tensor* out[2];
  double attrs[4];
  int n_in = 0, n_out = 0, n_attrs = 0;
  Call& input(const Operand* o) { return in[n_in++] = o ? &o->t : nullptr, *this; }
  Call& output(const Operand& o) { return out[n_out++] = &o.t, *this; }
  Call& attr(double v) { return attrs[n_attrs++] = v, *this; }
  // At every level of this CPU.
  void run(pelton_team* team, const char* name, int64_t workspace_bytes = 0) {
    void* workspace = aligned_alloc(64, (workspace_bytes + 127) / 64 * 64);
    const pelton_call call = {in, out, attrs, workspace, workspace_bytes, n_in, n_out, n_attrs, nullptr};
    int runs = 0;
    for (int level = 0; level < PELTON_LEVELS; level++)
      if (pelton_kernel kernel = pelton_find_kernel_at(name, level))
        CHECK(pelton_run_kernel(team, kernel, &call, 1) == PELTON_OK && ++runs);
    CHECK(runs > 0);
    free(workspace);
  }
};

const int64_t kDims[] = {1, 7, 8, 9, 16, 31, 33, 64, 80, 96, 128, 200};
constexpr int kCaches[] = {PELTON_F32, PELTON_F16, PELTON_BF16};

void rows_and_elements(Random& random, pelton_team* team) {
  const int64_t tokens = 1 + random.below(9), dim = random.pick(kDims, 12) + random.below(3);
  Operand x(PELTON_F32, 2, tokens, dim), z(PELTON_F32, 2, tokens, dim), w(PELTON_F32, 1, dim), bias(PELTON_F32, 1, dim);
  Operand y(PELTON_F32, 2, tokens, dim), total(PELTON_F32, 2, tokens, dim);
  x.fill(random), z.fill(random), w.fill(random), bias.fill(random);
  Call().input(&x).input(&w).output(y).attr(1e-5).run(team, "cpu.rms_norm");
  y.check_finite();
  Call().input(&x).input(&z).input(&w).output(y).output(total).attr(1e-5).run(team, "cpu.add_rms_norm");
  total.check_finite();
  Call().input(&x).input(&w).input(&bias).output(y).attr(1e-5).run(team, "cpu.layer_norm");
  const char* kinds[] = {"silu", "gelu", "gelu_tanh", "relu"};
  const double kind = PELTON_STRING(kinds[random.below(4)]);
  Call().input(&x).output(y).attr(kind).run(team, "cpu.activation");
  Call().input(&x).input(&z).output(y).attr(kind).run(team, "cpu.gated_activation");
  Call().input(&x).output(y).attr(30).run(team, "cpu.softcap");
  Call().input(&x).input(&z).output(y).run(team, "cpu.add");
  Call().input(&x).input(&z).output(y).run(team, "cpu.mul");
  Call().input(&x).output(y).attr(2).run(team, "cpu.scale");
  y.check_finite();
  const int64_t n = random.below(6);
  Operand index(PELTON_I32, 1, n), taken(PELTON_F32, 2, n, dim);
  for (int64_t i = 0; i < n; i++) index.ints()[i] = (int32_t)random.below(tokens);
  Call().input(&x).input(&index).output(taken).run(team, "cpu.take_rows");
  taken.check_finite();
  Operand order(PELTON_F32, 1, dim);
  for (int64_t i = 0; i < dim; i++) static_cast<float*>(order.t.data)[i] = (float)random.below(dim);
  Call().input(&x).input(&order).output(y).run(team, "cpu.take_columns");
  y.check_finite();
}

void pointwise(Random& random, pelton_team* team) {
  const int64_t tokens = 1 + random.below(9), dim = random.pick(kDims, 12) + random.below(3);
  Operand x(PELTON_F32, 2, tokens, dim), y(PELTON_F32, 2, tokens, dim), row(PELTON_F32, 2, tokens, 1);
  const Operand *other[] = {&x, &row};
  Operand half(random.below(2) ? PELTON_BF16 : PELTON_F16, 1, dim);
  x.fill(random), row.fill(random), half.fill(random);
  const char* functions[] = {"abs", "cos", "exp", "neg", "sigmoid", "sin", "square", "tanh"};
  Call().input(&x).output(y).attr(PELTON_STRING(functions[random.below(8)])).run(team, "cpu.unary");
  y.check_finite();
  const char* kinds[] = {"add", "max", "min", "mul", "sub"};
  const double kind = PELTON_STRING(kinds[random.below(5)]);
  Call().input(&x).input(other[random.below(2)]).output(y).attr(kind).run(team, "cpu.binary");
  Call().input(&x).input(&half).output(y).attr(kind).run(team, "cpu.binary");
  Call().input(&row).input(&x).output(y).attr(kind).run(team, "cpu.binary");
  y.check_finite();
  Call().input(&x).output(y).attr(0.5).attr(PELTON_STRING("rsub")).run(team, "cpu.binary_scalar");
  Call().input(&x).output(row).attr(PELTON_STRING("max")).attr(1).run(team, "cpu.reduce");
  Call().input(&x).output(row).attr(PELTON_STRING("mean")).attr(1).run(team, "cpu.reduce");
  row.check_finite();
  Call().input(&x).output(y).run(team, "cpu.softmax");
  y.check_finite();
  Operand turned(PELTON_F32, 2, dim, tokens), from(PELTON_F32, 2, tokens, dim);
  from.fill(random);
  for (int i = 0; i < 2; i++) from.t.shape[i] = turned.t.shape[i], from.t.stride[i] = i ? dim : 1;
  Call().input(&from).output(turned).run(team, "cpu.copy");
  turned.check_finite();
  Operand heads(PELTON_F32, 3, tokens, 2, dim), cos_sin(PELTON_F32, 2, tokens, 2 * (dim / 2)), out(PELTON_F32, 3, tokens, 2, dim);
  heads.fill(random), cos_sin.fill(random);
  Call().input(&heads).input(&cos_sin).output(out).run(team, "cpu.rope_interleaved");
  out.check_finite();
}

// ---- Kernels from outside -------------------------------------------------------------------------
int fails(const pelton_call*) { return 1; }
int counts(const pelton_call* c) { return ++*(int*)c->in[0]->data, 0; }
void adds(const pelton_kernel_args* a) {
  int64_t first, last;
  pelton_share(a, pelton_rows(a->in[0]), &first, &last);
  for (int64_t r = first; r < last; r++) pelton_row(a->out[0], r)[0] = pelton_row(a->in[0], r)[0] + 1;
}

void external(Random& random, pelton_team* team) {
  const int64_t n = 1 + random.below(40);
  Operand x(PELTON_F32, 2, n, 1), y(PELTON_F32, 2, n, 1), count(PELTON_I32, 1, 1);
  x.fill(random);
  count.ints()[0] = 0;
  const pelton_tensor *in[] = {&x.t}, *counted[] = {&count.t}, *out[] = {&y.t};
  pelton_call call = {in, out, nullptr, nullptr, 0, 1, 1, 0, (const void*)adds};
  CHECK(pelton_run_kernel(team, pelton_find_kernel("external.library"), &call, 1) == PELTON_OK);
  y.check_finite();
  call.function = (const void*)fails;
  CHECK(pelton_run_kernel(team, pelton_find_kernel("external.host"), &call, 3) == PELTON_ERROR_HOST);
  call.function = (const void*)counts;
  call.in = counted;
  CHECK(pelton_run_kernel(team, pelton_find_kernel("external.host"), &call, 5) == PELTON_OK);
  CHECK(count.ints()[0] == 5);
}

void attention(Random& random, pelton_team* team) {
  const int64_t kv_heads = 1 + random.below(3), group = 1 + random.below(6), dim = 2 * random.pick(kDims, 12);
  const int64_t block_size = 1 + random.below(17), n_seqs = 1 + random.below(3), columns = 200 / block_size + 2;
  const int64_t window = random.below(2) ? 0 : 1 + random.below(80), rotary = 2 * (1 + random.below(dim / 2));
  const int cache_type = kCaches[random.below(3)];
  int64_t queries[3], keys[3], tokens = 0, blocks = 0;
  for (int64_t b = 0; b < n_seqs; b++) {
    queries[b] = 1 + (random.below(2) ? random.below(40) : 0);
    keys[b] = queries[b] + random.below(150);
    tokens += queries[b];
    blocks += (keys[b] + block_size - 1) / block_size;
  }
  Operand table(PELTON_I32, 2, n_seqs, columns), cu(PELTON_I32, 1, n_seqs + 1), lens(PELTON_I32, 1, n_seqs);
  Operand k_cache(cache_type, 4, blocks, kv_heads, block_size, dim), v_cache(cache_type, 4, blocks, kv_heads, block_size, dim);
  // Past keys are written by kv_write, the step's own by rope_kv_write, as a model does.
  int64_t past = 0;
  for (int64_t b = 0; b < n_seqs; b++) past += keys[b] - queries[b];
  Operand old_slots(PELTON_I32, 1, past), slots(PELTON_I32, 1, tokens), positions(PELTON_I32, 1, tokens);
  int64_t used = 0, t = 0, o = 0;
  cu.ints()[0] = 0;
  for (int64_t b = 0; b < n_seqs; b++) {
    const int64_t n = (keys[b] + block_size - 1) / block_size;
    for (int64_t i = 0; i < n; i++) table.ints()[b * columns + i] = (int32_t)(used + i);
    for (int64_t p = 0; p < keys[b]; p++) {
      const int32_t slot = (int32_t)(used * block_size + p);
      if (p < keys[b] - queries[b]) {
        old_slots.ints()[o++] = slot;
      } else {
        positions.ints()[t] = (int32_t)p;
        slots.ints()[t++] = slot;
      }
    }
    used += n;
    cu.ints()[b + 1] = (int32_t)t;
    lens.ints()[b] = (int32_t)keys[b];
  }
  Operand old_k(PELTON_F32, 3, past, kv_heads, dim), old_v(PELTON_F32, 3, past, kv_heads, dim);
  Operand q(PELTON_F32, 3, tokens, kv_heads * group, dim), k(PELTON_F32, 3, tokens, kv_heads, dim);
  Operand v(PELTON_F32, 3, tokens, kv_heads, dim), inv_freq(PELTON_F32, 1, rotary / 2), cos_sin(PELTON_F32, 2, tokens, rotary);
  Operand rotated(PELTON_F32, 3, tokens, kv_heads * group, dim), out(PELTON_F32, 3, tokens, kv_heads * group, dim);
  Operand weight(PELTON_F32, 1, dim);
  old_k.fill(random), old_v.fill(random), q.fill(random), k.fill(random), v.fill(random);
  inv_freq.fill(random), weight.fill(random);
  const Operand* norm = random.below(2) ? &weight : nullptr;
  Call().input(&old_k).input(&old_v).input(&k_cache).input(&v_cache).input(&old_slots).run(team, "cpu.kv_write");
  Call().input(&positions).input(&inv_freq).output(cos_sin).attr(1).run(team, "cpu.rope_cos_sin");
  Call().input(&q).input(&cos_sin).output(rotated).run(team, "cpu.rope");
  Call().input(&q).input(&k).input(&v).input(&cos_sin).input(&k_cache).input(&v_cache).input(&slots).input(norm).input(norm)
      .output(rotated).attr(1e-6).run(team, "cpu.rope_kv_write");
  const int64_t workspace = random.below(2) ? 0 : 1 << 20;
  Call().input(&rotated).input(&k_cache).input(&v_cache).input(&table).input(&cu).input(&lens).output(out)
      .attr(0.1).attr((double)window).attr(random.below(2) ? 0 : 5).run(team, "cpu.paged_attention", workspace);
  out.check_finite();
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? atoi(argv[1]) : 60;
  pthread_t threads[2];  // several teams at once
  for (uintptr_t i = 0; i < 2; i++)
    CHECK(!pthread_create(&threads[i], nullptr, stress_pool_thread, reinterpret_cast<void*>(i + 1)));
  stress_pool(7, 25);
  for (pthread_t t : threads) pthread_join(t, nullptr);
  Random random = {42};
  for (int round = 0; round < rounds; round++) {
    pelton_team* team = pelton_team_create(1 + (int)random.below(4));
    for (int i = 0; i < 3; i++) rows_and_elements(random, team);
    pointwise(random, team);
    external(random, team);
    attention(random, team);
    pelton_team_destroy(team);
  }
  printf("native_stress: ok\n");
  return 0;
}
