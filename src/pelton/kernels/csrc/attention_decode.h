// Attention of one query: dot products straight from the cache, kChunk keys at a time. The query
// heads of a KV head go together, up to four, so that each key and value is loaded once for them.
#pragma once
#include "attention.h"

namespace {

constexpr int64_t kChunk = 128;

// A partial result of a group: rows of [maximum, sum, dim outputs not yet divided by the sum].

#if defined(__AVX2__)
inline __m256 fold(vf v) {
#if defined(__AVX512F__)
  return _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
#else
  return v;
#endif
}
// out[i] = sum of the lanes of a[i].
inline void hsum4(const vf* a, float* out) {
  const __m256 a0 = fold(a[0]), a1 = fold(a[1]), a2 = fold(a[2]), a3 = fold(a[3]);
  const __m256 b0 = _mm256_add_ps(_mm256_unpacklo_ps(a0, a1), _mm256_unpackhi_ps(a0, a1));
  const __m256 b1 = _mm256_add_ps(_mm256_unpacklo_ps(a2, a3), _mm256_unpackhi_ps(a2, a3));
  const __m256 c = _mm256_add_ps(_mm256_shuffle_ps(b0, b1, 0x44), _mm256_shuffle_ps(b0, b1, 0xee));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(c), _mm256_extractf128_ps(c, 1)));
}
#else
inline void hsum4(const vf* a, float* out) {
  for (int i = 0; i < 4; i++) out[i] = hsum(a[i]);
}
#endif

// Scores of R query rows against KEYS keys.
template <int DTYPE, int R, int KEYS>
inline void score_keys(const float* q, int64_t q_stride, const void* k, const int64_t* at, int64_t dim, float* s) {
  vf acc[R][KEYS];
  for (int r = 0; r < R; r++)
    for (int j = 0; j < KEYS; j++) acc[r][j] = vset(0);
  int64_t i = 0;
  for (; i + LANES <= dim; i += LANES) {
    vf x[R];
    for (int r = 0; r < R; r++) x[r] = load(q + r * q_stride + i);
    for (int j = 0; j < KEYS; j++) {
      const vf y = load_as<DTYPE>(k, at[j] + i);
      for (int r = 0; r < R; r++) acc[r][j] = vfma(x[r], y, acc[r][j]);
    }
  }
  if (i < dim) {
    const int n = (int)(dim - i);
    for (int j = 0; j < KEYS; j++) {
      const vf y = load_n_as<DTYPE>(k, at[j] + i, n);
      for (int r = 0; r < R; r++) acc[r][j] = vfma(load_n(q + r * q_stride + i, n), y, acc[r][j]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int j = 0; j < KEYS; j += 4) hsum4(acc[r] + j, s + r * kChunk + j);
}

// out[r] += sum over keys of p[r][key] * v[key], for V vectors of each row from element i on.
template <int DTYPE, int R, int V>
inline void add_values(const float* p, const void* v, const int64_t* at, int64_t n, int64_t i, float* out,
                       int64_t out_stride, int tail) {
  vf acc[R][V];
  for (int r = 0; r < R; r++)
    for (int j = 0; j < V; j++) acc[r][j] = vset(0);
  for (int64_t key = 0; key < n; key++) {
    vf y[V];
    for (int j = 0; j < V; j++)
      y[j] = tail ? load_n_as<DTYPE>(v, at[key] + i, tail) : load_as<DTYPE>(v, at[key] + i + j * LANES);
    for (int r = 0; r < R; r++) {
      const vf x = vset(p[r * kChunk + key]);
      for (int j = 0; j < V; j++) acc[r][j] = vfma(x, y[j], acc[r][j]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int j = 0; j < V; j++) store_some(out + r * out_stride + i + j * LANES, acc[r][j], tail ? tail : LANES);
}

// Rows of a block are contiguous but blocks are not, so the hardware's prefetcher keeps starting anew:
// ask for keys ahead of the dot products, and for the values that follow them. Into L2: fetches into L1 occupy
// its few miss buffers.
template <int DTYPE>
inline void prefetch_row(const void* base, int64_t at, int64_t dim) {
  constexpr int64_t item = DTYPE == PELTON_F32 ? 4 : DTYPE == PELTON_I8 || DTYPE == PELTON_F8 ? 1 : 2;
  const char* row = (const char*)base + at * item;
  for (int64_t i = 0; i < dim * item; i += 64) __builtin_prefetch(row + i, 0, 2);
}
constexpr int64_t kAhead = 32;  // keys

// The partial result of R query rows over n keys. `s` is scratch of R * kChunk floats.
template <int DTYPE, int R>
void attend_rows(const Attention& a, const float* q, int64_t q_stride, const int64_t* k_at, const int64_t* v_at,
                 int64_t n, float* partial, float* s) {
  constexpr int KEYS = R <= 3 ? (R == 1 ? 8 : 4) : 4;
  constexpr int V = R == 1 ? 8 : R == 4 && LANES < 16 ? 2 : 4;
  int64_t key = 0;
  for (; key + KEYS <= n; key += KEYS) {
    for (int64_t j = key; j < key + KEYS; j++) {
      if (j + kAhead < n) prefetch_row<DTYPE>(a.k->data, k_at[j + kAhead], a.dim);
      prefetch_row<DTYPE>(a.v->data, v_at[j], a.dim);
    }
    score_keys<DTYPE, R, KEYS>(q, q_stride, a.k->data, k_at + key, a.dim, s + key);
  }
  if (key < n) {  // the rest, filled up with copies of the last key
    int64_t at[KEYS];
    for (int j = 0; j < KEYS; j++) at[j] = k_at[key + j < n ? key + j : n - 1];
    score_keys<DTYPE, R, KEYS>(q, q_stride, a.k->data, at, a.dim, s + key);
  }
  const int64_t stride = a.dim + 2;
  for (int r = 0; r < R; r++) {
    float* row = s + r * kChunk;
    if (a.cap > 0) cap_scores(row, n, a.cap);
    for (int64_t j = n; j % LANES; j++) row[j] = -INFINITY;
    vf best = load(row), sum = vset(0);
    for (int64_t j = LANES; j < n; j += LANES) best = vmax(best, load(row + j));
    const float top = hmax(best);
    const vf base = vset(top);
    for (int64_t j = 0; j < n; j += LANES) {
      const vf e = vexp_negative(load(row + j) - base);
      store(row + j, e);
      sum = sum + e;
    }
    partial[r * stride] = top;
    partial[r * stride + 1] = hsum(sum);
  }
  float* out = partial + 2;
  int64_t i = 0;
  for (; i + V * LANES <= a.dim; i += V * LANES) add_values<DTYPE, R, V>(s, a.v->data, v_at, n, i, out, stride, 0);
  for (; i + LANES <= a.dim; i += LANES) add_values<DTYPE, R, 1>(s, a.v->data, v_at, n, i, out, stride, 0);
  if (i < a.dim) add_values<DTYPE, R, 1>(s, a.v->data, v_at, n, i, out, stride, (int)(a.dim - i));
}

// The partial result of one KV head's group over chunk number `chunk` of sequence b's keys.
template <int DTYPE>
void decode_chunk(const Attention& a, int64_t b, int64_t head, int64_t chunk, float* partial, float* scratch) {
  const int64_t position = a.seq_len(b) - 1, row = a.first_row(b), first = a.first_key(position);
  const int64_t begin = chunk * kChunk > first ? chunk * kChunk : first;
  const int64_t end = (chunk + 1) * kChunk < position + 1 ? (chunk + 1) * kChunk : position + 1;
  int64_t k_at[kChunk], v_at[kChunk];
  a.offsets(a.k, b, head, begin, end, k_at);
  a.offsets(a.v, b, head, begin, end, v_at);
  for (int64_t j = 0; j < kAhead && j < end - begin; j++) prefetch_row<DTYPE>(a.k->data, k_at[j], a.dim);
  float *s = scratch, *q = scratch + 4 * kChunk;
  const vf scale = vset(a.score_scale(head));
  const int64_t passes = (a.group + 3) / 4, rows = (a.group + passes - 1) / passes;
  for (int64_t r = 0; r < a.group; r += rows) {
    const int64_t count = a.group - r < rows ? a.group - r : rows;
    for (int64_t j = 0; j < count; j++) {
      const float* from = a.q_row(row, head * a.group + r + j);
      each_vector(a.dim, [=](int64_t i, int n) {
        store_some(q + j * a.dim + i, load_some(from + i, n) * scale, n);
      });
    }
    float* to = partial + r * (a.dim + 2);
    switch (count) {
      case 1: attend_rows<DTYPE, 1>(a, q, a.dim, k_at, v_at, end - begin, to, s); break;
      case 2: attend_rows<DTYPE, 2>(a, q, a.dim, k_at, v_at, end - begin, to, s); break;
      case 3: attend_rows<DTYPE, 3>(a, q, a.dim, k_at, v_at, end - begin, to, s); break;
      default: attend_rows<DTYPE, 4>(a, q, a.dim, k_at, v_at, end - begin, to, s); break;
    }
  }
}

// total = total and next together.
inline void merge(const Attention& a, float* total, const float* next) {
  for (int64_t r = 0; r < a.group; r++, total += a.dim + 2, next += a.dim + 2) {
    const float top = total[0] > next[0] ? total[0] : next[0];
    const float old_scale = expf(total[0] - top), new_scale = expf(next[0] - top);
    total[0] = top;
    total[1] = total[1] * old_scale + next[1] * new_scale;
    const vf x = vset(old_scale), y = vset(new_scale);
    float* to = total + 2;
    const float* from = next + 2;
    each_vector(a.dim, [=](int64_t i, int n) {
      store_some(to + i, vfma(load_some(from + i, n), y, load_some(to + i, n) * x), n);
    });
  }
}

inline void write_output(const Attention& a, int64_t b, int64_t head, const float* partial) {
  for (int64_t r = 0; r < a.group; r++, partial += a.dim + 2) {
    const int64_t q_head = head * a.group + r;
    const vf inverse = vset(a.value_scale(head) / a.softmax_sum(q_head, partial[0], partial[1]));
    float* to = a.out_row(a.first_row(b), q_head);
    each_vector(a.dim, [=](int64_t i, int n) {
      store_some(to + i, load_some(partial + 2 + i, n) * inverse, n);
    });
  }
}

// All of sequence b for one KV head, by one thread: the same chunks, merged in the same order.
template <int DTYPE>
void decode_head(const Attention& a, int64_t b, int64_t head, float* scratch) {
  const int64_t position = a.seq_len(b) - 1, size = a.group * (a.dim + 2);
  float *total = scratch, *next = total + size, *rest = next + size;
  const int64_t first = a.first_key(position) / kChunk;
  decode_chunk<DTYPE>(a, b, head, first, total, rest);
  for (int64_t chunk = first + 1; chunk <= position / kChunk; chunk++) {
    decode_chunk<DTYPE>(a, b, head, chunk, next, rest);
    merge(a, total, next);
  }
  write_output(a, b, head, total);
}

}  // namespace
