// What the machine itself can do: the ceilings that `pelton profile` compares kernels with.
//
// cpu.measure.read: all threads read `x` once. cpu.measure.f32 and .int8: attrs[0] rounds of multiply-adds
// in registers on every thread, the instructions that the linear kernels of this level are made of.
// `out`, float32 (threads, 2): millions of operations done (a multiply-add is two), and a checksum that
// keeps the work alive. A file defines PELTON_MEASURE_LEVEL and includes its gemm_vec_*.h first.
#include "kernel_util.h"

namespace {

constexpr int kChains = 10;  // independent, so that latency does not count
constexpr int64_t kReadChunk = 1 << 18;

// The compiler may not take the operand for a constant and move products out of the loop.
template <class V>
PELTON_INLINE void touch(V& v) {
  asm volatile("" : "+m"(v));
}

PELTON_INLINE void finish(const pelton_call* c, int thread, double operations, float checksum) {
  float* row = pelton_row_f32(c->out[0], thread);
  row[0] = (float)(operations * 1e-6);
  row[1] = checksum;
}

PELTON_INLINE float first_lane(F v) {
  float lanes[kLanes];
  store_f32(lanes, v);
  return lanes[0];
}

void measure_f32(const pelton_call* c, pelton_team*, int thread) {
  const int64_t rounds = (int64_t)pelton_attr(c, 0, 1);
  F acc[kChains], a = constant(0.5f), b = constant(1.0f);
  for (F& v : acc) v = zero();
  touch(a);
  for (int64_t r = 0; r < rounds; r++)
    for (F& v : acc) v = fma(v, a, b);
  F sum = zero();
  for (F& v : acc) sum = add(sum, v);
  finish(c, thread, 2.0 * kLanes * kChains * rounds, first_lane(sum));
}

// Blocks of 8 x 4 columns, as the linear kernels have them; operands differ, or products would be shared.
void measure_int8(const pelton_call* c, pelton_team*, int thread) {
  const int64_t rounds = (int64_t)pelton_attr(c, 0, 1);
  const uint8_t none[4] = {0};
  uint8_t ones[kChains][64];
  memset(ones, 1, sizeof ones);
  I total = load(ones);
  for (int64_t r = 0; r < rounds; r++) {
    touch(ones);
#pragma GCC unroll 10
    for (int k = 0; k < kChains; k++) {
      const I x = load(ones[k]);
      Dot<Q4_1> dot;
      dot.start(none, 0);
#pragma GCC unroll 8
      for (int n = 0; n < 8; n++) dot.add(n, load(ones[n]), x);
      total = add(total, dot.sum(none, 0));
    }
  }
  finish(c, thread, 2.0 * 8 * 4 * kLanes * kChains * rounds, first_lane(to_float(total)));
}

void measure_read(const pelton_call* c, pelton_team* team, int thread) {
  const char* x = (const char*)c->in[0]->data;
  const int64_t n = c->in[0]->shape[0] / kReadChunk;
  constexpr int kWidth = 4 * kLanes;
  I acc[4];
  for (I& v : acc) v = load(x);
  for (int64_t i; (i = pelton_claim(team, n)) >= 0;)
    for (const char *p = x + i * kReadChunk, *end = p + kReadChunk; p < end; p += 4 * kWidth)
      for (int k = 0; k < 4; k++) acc[k] = add(acc[k], load(p + k * kWidth));
  F sum = zero();
  for (I& v : acc) sum = add(sum, to_float(v));
  finish(c, thread, 0, first_lane(sum));
}

}  // namespace

PELTON_KERNEL("cpu.measure.f32", PELTON_MEASURE_LEVEL, measure_f32);
PELTON_KERNEL("cpu.measure.int8", PELTON_MEASURE_LEVEL, measure_int8);
PELTON_KERNEL("cpu.measure.read", PELTON_MEASURE_LEVEL, measure_read);
