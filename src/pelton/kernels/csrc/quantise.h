// float32 rows to int8 in blocks of 32: the input of products with int8 activations (quantize_q8).
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "kernel_util.h"
#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

// A quantised row is its blocks one after another, 44 bytes each, so that it serves tiles of any width. A value is
// d q, d = max|x| / 127; NaN where a value is not finite. Weights need the sums: d sum(q) where they have an
// offset of their own, the integers (of the block's halves) where their zero point is not 0.
constexpr int64_t kActBytes = 44, kActScale = 32, kActSum = 36, kActHalves = 40;

struct Block8 {
  alignas(32) int8_t q[32];
  float d;  // NaN when a value is not finite
  int32_t first, second;  // sums of q over each half
};

#ifdef __AVX2__
inline int32_t sum_lanes(__m128i v) {
  v = _mm_add_epi32(v, _mm_shuffle_epi32(v, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(v, _mm_shuffle_epi32(v, 0xb1)));
}

inline void quantise_block(const float* x, Block8& out) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  __m256 v[4], a[4];
  for (int i = 0; i < 4; i++) {
    v[i] = _mm256_loadu_ps(x + 8 * i);
    a[i] = _mm256_andnot_ps(sign, v[i]);
  }
  // max drops a NaN in its first operand, so whether all are finite is a question of its own.
  const __m256 m = _mm256_max_ps(_mm256_max_ps(a[0], a[1]), _mm256_max_ps(a[2], a[3]));
  const __m256 s = _mm256_add_ps(_mm256_add_ps(a[0], a[1]), _mm256_add_ps(a[2], a[3]));
  const __m256 wild = _mm256_cmp_ps(_mm256_sub_ps(s, s), _mm256_setzero_ps(), _CMP_NEQ_UQ);
  __m128 h = _mm_max_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
  h = _mm_max_ps(h, _mm_movehl_ps(h, h));
  h = _mm_max_ss(h, _mm_movehdup_ps(h));
  const float top = _mm_cvtss_f32(h);
  const __m256 inverse = _mm256_set1_ps(top > 0 ? 127 / top : 0);
  __m256i q[4];
  for (int i = 0; i < 4; i++) q[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse));
  const __m256i mixed =
      _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
  const __m256i bytes = _mm256_permutevar8x32_epi32(mixed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  _mm256_store_si256((__m256i*)out.q, bytes);
  const __m256i sums = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes), _mm256_set1_epi16(1));
  out.first = sum_lanes(_mm256_castsi256_si128(sums));
  out.second = sum_lanes(_mm256_extracti128_si256(sums, 1));
  out.d = _mm256_movemask_ps(wild) ? __builtin_nanf("") : top / 127;
}
#else
inline void quantise_block(const float* x, Block8& out) {
  float top = 0;
  bool finite = true;
  for (int i = 0; i < 32; i++) {
    const float a = fabsf(x[i]);
    top = a > top ? a : top;
    finite &= a <= 3.4028234663852886e38f;
  }
  const float inverse = top > 0 ? 127 / top : 0;
  out.first = out.second = 0;
  for (int i = 0; i < 32; i++) {
    out.q[i] = finite ? (int8_t)rintf(x[i] * inverse) : 0;
    (i < 16 ? out.first : out.second) += out.q[i];
  }
  out.d = finite ? top / 127 : __builtin_nanf("");
}
#endif

inline void quantise_row(const float* x, int64_t blocks, uint8_t* to) {
  for (int64_t b = 0; b < blocks; b++, x += 32, to += kActBytes) {
    Block8 block;
    quantise_block(x, block);
    const float sum = block.d * (float)(block.first + block.second);
    const int16_t halves[2] = {(int16_t)block.first, (int16_t)block.second};
    memcpy(to, block.q, 32);
    memcpy(to + kActScale, &block.d, 4);
    memcpy(to + kActSum, &sum, 4);
    memcpy(to + kActHalves, halves, 4);
  }
}

}  // namespace
