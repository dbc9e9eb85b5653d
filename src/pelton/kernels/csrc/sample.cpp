// Choosing tokens from logits. The rules are those of sampling/reference.py, which gives the same tokens.
#include "sample_loops.h"

#include <stdlib.h>

#include <algorithm>

#include "pelton.h"

const pelton_sample_loops pelton_sample_loops_generic = {clean, weights, block_sum, count_above, at_least};

namespace {

const pelton_sample_loops& loops() {
#if defined(__x86_64__)
  static const bool avx2 = pelton_has_level(PELTON_AVX2);
  if (avx2) return pelton_sample_loops_avx2;
#endif
  return pelton_sample_loops_generic;
}

// ---- Random numbers: SplitMix64 --------------------------------------------------------------------
uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}
double uniform(uint64_t seed, int64_t position) {
  return (double)(mix(mix(seed) + ((uint64_t)position + 1) * 0x9E3779B97F4A7C15ull) >> 11) * 0x1p-53;
}

// ---- Sums and draws ----------------------------------------------------------------------------------
int64_t block_end(int64_t start, int64_t n) { return start + 1024 < n ? start + 1024 : n; }

double sum(const float* w, int64_t n) {
  double total = 0;
  for (int64_t b = 0; b < n; b += 1024) total += loops().block_sum(w + b, block_end(b, n) - b);
  return total;
}

int64_t last_positive(const float* w, int64_t lo, int64_t hi) {
  while (hi > lo + 1 && !(w[hi - 1] > 0)) hi--;
  return hi - 1;
}

// First index at which the running sum exceeds u times the sum.
int64_t draw(const float* w, int64_t n, double u) {
  const double goal = u * sum(w, n);
  double running = 0;
  for (int64_t b = 0; b < n; b += 1024) {
    const int64_t end = block_end(b, n);
    const double after = running + loops().block_sum(w + b, end - b);
    if (after > goal) {
      for (int64_t i = b; i < end; i++)
        if ((running += (double)w[i]) > goal) return i;
      return last_positive(w, b, end);
    }
    running = after;
  }
  return last_positive(w, 0, n);
}

// ---- Order: descending logits, equal ones by index ---------------------------------------------------
struct Before {
  const float* l;
  bool operator()(int32_t a, int32_t b) const { return l[a] > l[b] || (l[a] == l[b] && a < b); }
};

// The first k in that order, sorted. `top` has room for k.
void largest(const float* l, int64_t n, int64_t k, int32_t* top) {
  if (k <= 0) return;
  const Before before{l};
  for (int64_t i = 0; i < k; i++) top[i] = (int32_t)i;
  std::make_heap(top, top + k, before);  // the last in the order is at the front
  float least = l[top[0]];
  for (int64_t i = k; i < n; i++) {
    if (!(l[i] > least)) continue;
    std::pop_heap(top, top + k, before);
    top[k - 1] = (int32_t)i;
    std::push_heap(top, top + k, before);
    least = l[top[0]];
  }
  std::sort_heap(top, top + k, before);
}

// Position of a logit in that order, equal ones alike: descending floats become ascending integers.
uint32_t rank_key(float v) {
  v += 0.0f;  // -0 equals 0
  uint32_t bits;
  memcpy(&bits, &v, 4);
  return bits >> 31 ? bits : ~bits & 0x7FFFFFFFu;
}

// Brings `order`, ascending indices, into that order. `a` and `b` have room for n.
void sort_by_logit(const float* l, int32_t* order, int64_t n, uint64_t* a, uint64_t* b) {
  for (int64_t i = 0; i < n; i++) a[i] = (uint64_t)rank_key(l[order[i]]) << 32 | (uint32_t)order[i];
  if (n < 1024) {
    std::sort(a, a + n);
  } else {
    // Radix sort by the keys alone, 11 bits at a time: it keeps equal ones in the order of their indices.
    for (int shift = 32; shift < 64; shift += 11) {
      int64_t place[2048] = {0}, next = 0;
      for (int64_t i = 0; i < n; i++) place[a[i] >> shift & 2047]++;
      for (int64_t& p : place) {
        const int64_t count = p;
        p = next;
        next += count;
      }
      for (int64_t i = 0; i < n; i++) b[place[a[i] >> shift & 2047]++] = a[i];
      std::swap(a, b);
    }
  }
  for (int64_t i = 0; i < n; i++) order[i] = (int32_t)(uint32_t)a[i];
}

// The tokens up to and with `last` in that order, in index order.
void by_index(const float* l, int64_t n, int32_t last, int32_t* order) {
  const float least = l[last];
  const int64_t some = loops().at_least(l, n, least, order);
  int64_t out = 0;
  for (int64_t i = 0; i < some; i++)
    if (l[order[i]] > least || order[i] <= last) order[out++] = order[i];
}

// Length of the shortest beginning of `order` whose weights reach `goal`; 0: none does.
int64_t reach(const int32_t* order, int64_t n, const float* w, double goal) {
  double running = 0;
  for (int64_t i = 0; i < n; i++)
    if ((running += (double)w[order[i]]) >= goal) return i + 1;
  return 0;
}

// What stays of all n tokens under top_p, in descending order; few are sorted in the usual case.
int64_t nucleus(const float* l, const float* w, int64_t n, float top, float t, double p, int32_t* order,
                uint64_t* a, uint64_t* b) {
  const double goal = p * sum(w, n);
  for (float width = 4; width < 100; width *= 2) {
    const int64_t some = loops().at_least(l, n, top - width * t, order);
    if (some == n) break;
    double mass = 0;
    for (int64_t i = 0; i < some; i++) mass += (double)w[order[i]];
    if (mass < goal) continue;
    sort_by_logit(l, order, some, a, b);
    if (const int64_t kept = reach(order, some, w, goal)) return kept;
  }
  for (int64_t i = 0; i < n; i++) order[i] = (int32_t)i;
  sort_by_logit(l, order, n, a, b);
  const int64_t kept = reach(order, n, w, goal);
  return kept ? kept : n;
}

struct Row {
  const float* l;  // cleaned
  int64_t n;
  float top;
};

int32_t arg_max(const Row& row) {
  for (int64_t i = 0; i < row.n; i++)
    if (row.l[i] == row.top) return (int32_t)i;
  return 0;
}

int32_t choose(const Row& row, float t, int64_t k, double p, float min_p, double u, float* w, int32_t* order,
               float* kept_w, uint64_t* keys) {
  loops().weights(row.l, w, row.n, row.top, t);
  int64_t kept = row.n;
  const bool truncate_k = k > 0 && k < row.n, truncate = truncate_k || p < 1;
  if (truncate_k) {
    kept = k;
    largest(row.l, row.n, k, order);
    if (p < 1) {
      int32_t* sorted = order + k;  // k more places
      std::copy(order, order + k, sorted);
      std::sort(sorted, sorted + k);
      for (int64_t i = 0; i < k; i++) kept_w[i] = w[sorted[i]];
      const int64_t few = reach(order, k, w, p * sum(kept_w, k));
      kept = few ? few : k;
    }
  } else if (p < 1) {
    kept = nucleus(row.l, w, row.n, row.top, t, p, order, keys, keys + row.n);
  }
  float* final_w = w;
  if (truncate) {
    if (kept < 1024)
      std::sort(order, order + kept);
    else
      by_index(row.l, row.n, order[kept - 1], order);
    for (int64_t i = 0; i < kept; i++) kept_w[i] = w[order[i]];
    final_w = kept_w;
  }
  if (min_p > 0)
    for (int64_t i = 0; i < kept; i++) final_w[i] = final_w[i] < min_p ? 0 : final_w[i];
  const int64_t i = draw(final_w, kept, u);
  return truncate ? order[i] : (int32_t)i;
}

// log(sum(exp(l - top))); `w` is scratch.
double log_sum(const Row& row, float* w) {
  if (row.top == INFINITY || row.top == -INFINITY) return 0;
  loops().weights(row.l, w, row.n, row.top, 1);
  return log(sum(w, row.n));
}
float logprob(const Row& row, int32_t token, double log_total) {
  return row.l[token] == -INFINITY ? -INFINITY : (float)((double)(row.l[token] - row.top) - log_total);
}

}  // namespace

extern "C" {

int pelton_sample(const float* logits, int64_t stride, int64_t n, int64_t vocab, const float* temperature,
                  const int32_t* top_k, const float* top_p, const float* min_p, const uint64_t* seed,
                  const int64_t* position, int32_t* tokens, float* logprobs) {
  // Per token: two 64-bit keys, then three floats and two indices.
  uint64_t* keys = static_cast<uint64_t*>(malloc((size_t)vocab * (2 * sizeof(uint64_t) + 5 * sizeof(float))));
  if (!keys) return PELTON_ERROR_MEMORY;
  float *l = (float*)(keys + 2 * vocab), *w = l + vocab, *kept_w = w + vocab;
  int32_t* order = (int32_t*)(kept_w + vocab);  // 2 * vocab places
  for (int64_t i = 0; i < n; i++) {
    const float top = loops().clean(logits + i * stride, l, vocab);
    const Row row{l, vocab, top};
    if (temperature[i] == 0 || top == INFINITY || top == -INFINITY)
      tokens[i] = arg_max(row);
    else
      tokens[i] = choose(row, temperature[i], top_k[i], (double)top_p[i], min_p[i],
                         uniform(seed[i], position[i]), w, order, kept_w, keys);
    if (logprobs) logprobs[i] = logprob(row, tokens[i], log_sum(row, w));
  }
  free(keys);
  return PELTON_OK;
}

int pelton_log_softmax_topk(const float* logits, int64_t stride, int64_t n, int64_t vocab,
                            const int32_t* chosen, int64_t k, float* chosen_logprobs, int32_t* ranks,
                            int32_t* ids, float* logprobs) {
  float* scratch = static_cast<float*>(malloc((size_t)vocab * 2 * sizeof(float)));
  if (!scratch) return PELTON_ERROR_MEMORY;
  float *l = scratch, *w = l + vocab;
  for (int64_t i = 0; i < n; i++) {
    const Row row{l, vocab, loops().clean(logits + i * stride, l, vocab)};
    const double total = log_sum(row, w);
    chosen_logprobs[i] = logprob(row, chosen[i], total);
    ranks[i] = (int32_t)(1 + loops().count_above(l, vocab, l[chosen[i]]));
    largest(l, vocab, k, ids + i * k);
    for (int64_t j = 0; j < k; j++) logprobs[i * k + j] = logprob(row, ids[i * k + j], total);
  }
  free(scratch);
  return PELTON_OK;
}

}  // extern "C"
