// Attention of several queries of a sequence: tiles of queries against tiles of keys with a running
// softmax (Milakov & Gimelshein, 2018; FlashAttention, Dao et al., 2022).
//
// The query heads of a KV head are stacked: row r of a tile is query r / group, head r % group. Both
// products are C += A B with A's elements broadcast: scores = Q K^T (K transposed while packing) and
// O = P V. Rows are independent of one another in every step.
#pragma once
#include "attention.h"

namespace {

constexpr int64_t kTile = 64;                   // keys in a tile, at multiples of it
constexpr int kBlockRows = LANES == 16 ? 12 : LANES == 8 ? 6 : 4;  // rows whose sums stay in registers
constexpr int kBlockCols = 2 * LANES;
constexpr int64_t kTileRows = 72;  // rows of a query tile, about

inline int64_t queries_per_tile(const Attention& a) {
  // Q, O and scores of a tile, K^T and V must fit in the scratch.
  const int64_t width = round_up(a.dim, kBlockCols);
  const int64_t floats = PELTON_SCRATCH_BYTES / (int64_t)sizeof(float) - kTile * (a.dim + width) - 4096;
  int64_t rows = floats / (a.dim + width + kTile + 2);
  rows = rows < kTileRows ? rows : kTileRows;
  return rows > a.group ? rows / a.group : 1;
}
inline int64_t query_tiles(const Attention& a, int64_t queries) {
  const int64_t n = queries_per_tile(a);
  return (queries + n - 1) / n;
}

// C[M][kBlockCols] = (or +=) A[M][depth] B[depth][kBlockCols].
template <int M, bool ADD>
inline void multiply_block(const float* A, int64_t lda, const float* B, int64_t ldb, float* C, int64_t ldc,
                           int64_t depth) {
  vf acc[M][2];
  for (int i = 0; i < M; i++)
    for (int j = 0; j < 2; j++) acc[i][j] = ADD ? load(C + i * ldc + j * LANES) : vset(0);
  for (int64_t k = 0; k < depth; k++) {
    const vf b0 = load(B + k * ldb), b1 = load(B + k * ldb + LANES);
    for (int i = 0; i < M; i++) {
      const vf x = vset(A[i * lda + k]);
      acc[i][0] = vfma(x, b0, acc[i][0]);
      acc[i][1] = vfma(x, b1, acc[i][1]);
    }
  }
  for (int i = 0; i < M; i++)
    for (int j = 0; j < 2; j++) store(C + i * ldc + j * LANES, acc[i][j]);
}

// The same for `rows` <= kBlockRows rows and `cols` columns (a multiple of kBlockCols).
template <bool ADD>
void multiply(const float* A, int64_t lda, const float* B, int64_t ldb, float* C, int64_t ldc, int64_t rows,
              int64_t cols, int64_t depth) {
  for (int64_t j = 0; j < cols; j += kBlockCols) {
    int64_t i = 0;
    if (rows == kBlockRows) {
      multiply_block<kBlockRows, ADD>(A, lda, B + j, ldb, C + j, ldc, depth);
      continue;
    }
    for (; i + 3 <= rows; i += 3) multiply_block<3, ADD>(A + i * lda, lda, B + j, ldb, C + i * ldc + j, ldc, depth);
    for (; i < rows; i++) multiply_block<1, ADD>(A + i * lda, lda, B + j, ldb, C + i * ldc + j, ldc, depth);
  }
}

#if defined(__AVX2__)
// to[j][i] = from[i][j] for 8 x 8.
inline void transpose8(const __m256* r, float* to, int64_t stride) {
  const __m256 a0 = _mm256_unpacklo_ps(r[0], r[1]), a1 = _mm256_unpackhi_ps(r[0], r[1]);
  const __m256 a2 = _mm256_unpacklo_ps(r[2], r[3]), a3 = _mm256_unpackhi_ps(r[2], r[3]);
  const __m256 a4 = _mm256_unpacklo_ps(r[4], r[5]), a5 = _mm256_unpackhi_ps(r[4], r[5]);
  const __m256 a6 = _mm256_unpacklo_ps(r[6], r[7]), a7 = _mm256_unpackhi_ps(r[6], r[7]);
  const __m256 b[8] = {_mm256_shuffle_ps(a0, a2, 0x44), _mm256_shuffle_ps(a0, a2, 0xee),
                       _mm256_shuffle_ps(a1, a3, 0x44), _mm256_shuffle_ps(a1, a3, 0xee),
                       _mm256_shuffle_ps(a4, a6, 0x44), _mm256_shuffle_ps(a4, a6, 0xee),
                       _mm256_shuffle_ps(a5, a7, 0x44), _mm256_shuffle_ps(a5, a7, 0xee)};
  for (int i = 0; i < 4; i++) {
    _mm256_storeu_ps(to + i * stride, _mm256_permute2f128_ps(b[i], b[i + 4], 0x20));
    _mm256_storeu_ps(to + (i + 4) * stride, _mm256_permute2f128_ps(b[i], b[i + 4], 0x31));
  }
}
template <int DTYPE>
inline __m256 load8(const void* base, int64_t i) {
  if (DTYPE == PELTON_F32) return _mm256_loadu_ps((const float*)base + i);
  if (DTYPE == PELTON_I8 || DTYPE == PELTON_F8) {
#if defined(__AVX512F__)
    alignas(16) uint8_t bytes[16] = {0};
    memcpy(bytes, (const uint8_t*)base + i, 8);
    return _mm512_castps512_ps256(load_as<DTYPE>(bytes, 0));
#else
    return load_as<DTYPE>(base, i);
#endif
  }
  const __m128i half = _mm_loadu_si128((const __m128i*)((const uint16_t*)base + i));
  if (DTYPE == PELTON_F16) return _mm256_cvtph_ps(half);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
#endif

// kt[dim][kTile]: keys `at[0..n)` as columns from `first` on; the other columns are zero.
template <int DTYPE>
void pack_keys(const Attention& a, const int64_t* at, int64_t first, int64_t n, float* kt) {
  if (n < kTile) memset(kt, 0, (size_t)(a.dim * kTile) * sizeof(float));
  int64_t j = 0;
#if defined(__AVX2__)
  for (; j + 8 <= n; j += 8) {
    int64_t i = 0;
    for (; i + 8 <= a.dim; i += 8) {
      __m256 rows[8];
      for (int r = 0; r < 8; r++) rows[r] = load8<DTYPE>(a.k->data, at[j + r] + i);
      transpose8(rows, kt + i * kTile + first + j, kTile);
    }
    for (; i < a.dim; i++)
      for (int r = 0; r < 8; r++) kt[i * kTile + first + j + r] = pelton_load(a.k->data, DTYPE, at[j + r] + i);
  }
#endif
  for (; j < n; j++)
    for (int64_t i = 0; i < a.dim; i++) kt[i * kTile + first + j] = pelton_load(a.k->data, DTYPE, at[j] + i);
}

// vt[kTile][width]: values as rows from `first` on; the other rows and columns are zero.
template <int DTYPE>
void pack_values(const Attention& a, const int64_t* at, int64_t first, int64_t n, int64_t width, float* vt) {
  if (n < kTile || width != a.dim) memset(vt, 0, (size_t)(kTile * width) * sizeof(float));
  for (int64_t j = 0; j < n; j++) {
    float* to = vt + (first + j) * width;
    each_vector(a.dim, [&](int64_t i, int k) {
      store_some(to + i, k == LANES ? load_as<DTYPE>(a.v->data, at[j] + i) : load_n_as<DTYPE>(a.v->data, at[j] + i, k), k);
    });
  }
}

// Turns a row's scores of one tile into probabilities not yet divided by their sum: columns outside
// [lo, hi) become 0. Updates the row's maximum and sum, and scales its output to the new maximum.
inline void softmax_row(float* s, int64_t cols, int64_t lo, int64_t hi, float cap, float* top, float* total,
                        float* out, int64_t width) {
  if (lo >= hi) {  // nothing visible here
    memset(s, 0, (size_t)cols * sizeof(float));
    return;
  }
  if (cap > 0) cap_scores(s, cols, cap);
  vf best = vset(-INFINITY);
  if (lo > 0 || hi < cols) {
    float lanes[LANES];
    for (int i = 0; i < LANES; i++) lanes[i] = (float)i;
    const vf iota = load(lanes), none = vset(-INFINITY), from = vset((float)lo), to = vset((float)hi);
    for (int64_t j = 0; j < cols; j += LANES) {
      const vf column = iota + vset((float)j);
      const vf x = vselect(vless(column, to), vselect(vless(column, from), none, load(s + j)), none);
      store(s + j, x);
      best = vmax(best, x);
    }
  } else {
    for (int64_t j = 0; j < cols; j += LANES) best = vmax(best, load(s + j));
  }
  const float tile_top = hmax(best), new_top = *top > tile_top ? *top : tile_top;
  const vf base = vset(new_top);
  vf sum = vset(0);
  for (int64_t j = 0; j < cols; j += LANES) {
    const vf e = vexp_negative(load(s + j) - base);
    store(s + j, e);
    sum = sum + e;
  }
  if (new_top != *top && *total != 0) {
    const float shrink = expf(*top - new_top);
    *total *= shrink;
    const vf x = vset(shrink);
    for (int64_t i = 0; i < width; i += LANES) store(out + i, load(out + i) * x);
  }
  *top = new_top;
  *total += hsum(sum);
}

// Columns of the key tile at `t` that some of rows [r, r + n) may see (0: none).
inline int64_t seen_columns(const Attention& a, int64_t position, int64_t t, int64_t r, int64_t n) {
  const int64_t newest = position + (r + n - 1) / a.group, oldest = position + r / a.group;
  if (newest < t || a.first_key(oldest) >= t + kTile) return 0;
  return newest + 1 - t < kTile ? newest + 1 - t : kTile;
}

// Query tile `tile` of sequence b for one KV head.
template <int DTYPE>
void prefill_tile(const Attention& a, int64_t b, int64_t head, int64_t tile, float* scratch) {
  const int64_t per_tile = queries_per_tile(a), first = tile * per_tile, all = a.queries(b);
  const int64_t queries = all - first < per_tile ? all - first : per_tile, rows = queries * a.group;
  const int64_t position = a.seq_len(b) - all + first;  // of the first query
  const int64_t dim = a.dim, width = round_up(dim, kBlockCols);

  float* q = scratch;
  float* out = q + round_up(rows * dim, 16);
  float* kt = out + rows * width;
  float* vt = kt + dim * kTile;
  float* s = vt + kTile * width;
  float* top = s + rows * kTile;
  float* total = top + rows;

  const vf scale = vset(a.score_scale(head));
  for (int64_t r = 0; r < rows; r++) {
    const float* from = a.q_row(a.first_row(b) + first + r / a.group, head * a.group + r % a.group);
    float* to = q + r * dim;
    each_vector(dim, [=](int64_t i, int n) { store_some(to + i, load_some(from + i, n) * scale, n); });
    top[r] = -INFINITY;
    total[r] = 0;
  }
  memset(out, 0, (size_t)(rows * width) * sizeof(float));

  const int64_t first_key = a.first_key(position), last_key = position + queries - 1;
  for (int64_t t = first_key / kTile * kTile; t <= last_key; t += kTile) {
    // Only keys that some row sees are read.
    const int64_t begin = first_key > t ? first_key : t, end = last_key + 1 < t + kTile ? last_key + 1 : t + kTile;
    int64_t at[kTile];
    a.offsets(a.k, b, head, begin, end, at);
    pack_keys<DTYPE>(a, at, begin - t, end - begin, kt);
    a.offsets(a.v, b, head, begin, end, at);
    pack_values<DTYPE>(a, at, begin - t, end - begin, width, vt);

    // All scores, then all outputs: K^T, and after it V, stays in the first-level cache.
    for (int64_t r = 0; r < rows; r += kBlockRows) {
      const int64_t n = rows - r < kBlockRows ? rows - r : kBlockRows, seen = seen_columns(a, position, t, r, n);
      if (seen <= 0) continue;
      const int64_t cols = round_up(seen, kBlockCols);
      multiply<false>(q + r * dim, dim, kt, kTile, s + r * kTile, kTile, n, cols, dim);
      for (int64_t i = r; i < r + n; i++) {
        const int64_t p = position + i / a.group, low = a.first_key(p) - t;
        softmax_row(s + i * kTile, cols, low > 0 ? low : 0, p + 1 - t < kTile ? p + 1 - t : kTile, a.cap, top + i,
                    total + i, out + i * width, width);
      }
    }
    for (int64_t r = 0; r < rows; r += kBlockRows) {
      const int64_t n = rows - r < kBlockRows ? rows - r : kBlockRows, seen = seen_columns(a, position, t, r, n);
      if (seen > 0) multiply<true>(s + r * kTile, kTile, vt, width, out + r * width, width, n, width, seen);
    }
  }

  for (int64_t r = 0; r < rows; r++) {
    const int64_t q_head = head * a.group + r % a.group;
    const vf inverse = vset(a.value_scale(head) / a.softmax_sum(q_head, top[r], total[r]));
    const float* from = out + r * width;
    float* to = a.out_row(a.first_row(b) + first + r / a.group, q_head);
    each_vector(dim, [=](int64_t i, int n) { store_some(to + i, load_some(from + i, n) * inverse, n); });
  }
}

}  // namespace
