// float32 activations to int8, per token and block of 32 columns (linear with int8 activations).
// Included after a gemm_vec_*.h.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "kernel_util.h"
#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

// Quantised activations: groups of kTileTokens tokens (the last may have fewer: R), and per group and
// block { int8 q[8][R][4]; float d[R]; 4 bytes a[R]; 4 bytes b[R] }, so that a tile reads one stream. A
// value is d q, d = max|x| / 127. a: the sum of the block's values (of its first half when Halves is 2);
// b: the sum of the second half when Halves is 2, else the integer -128 * sum(q).
constexpr int64_t kActBytes = 44;  // per token and block

inline int64_t act_group_offset(int64_t group, int64_t blocks) {
  return group * kTileTokens * blocks * kActBytes;
}

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

template <int Halves>
inline void quantise_token(const float* x, int64_t blocks, uint8_t* group, int lane, int lanes) {
  for (int64_t b = 0; b < blocks; b++, x += 32, group += lanes * kActBytes) {
    Block8 block;
    quantise_block(x, block);
    for (int g = 0; g < 8; g++) memcpy(group + (g * lanes + lane) * 4, block.q + 4 * g, 4);
    float* f = (float*)(group + 32 * lanes) + lane;
    f[0] = block.d;
    if (Halves == 2) {
      f[lanes] = block.d * (float)block.first;
      f[2 * lanes] = block.d * (float)block.second;
    } else {
      const int32_t sum = block.first + block.second, offset = -128 * sum;
      f[lanes] = block.d * (float)sum;
      memcpy(f + 2 * lanes, &offset, 4);
    }
  }
}

template <int Halves>
inline void quantise_tokens(const pelton_tensor* x, int64_t lo, int64_t hi, int64_t blocks, uint8_t* act) {
  const int64_t tokens = x->shape[0];
  for (int64_t t = lo; t < hi; t++) {
    const int64_t group = t / kTileTokens, left = tokens - group * kTileTokens;
    quantise_token<Halves>(pelton_row_f32(x, t), blocks, act + act_group_offset(group, blocks),
                           (int)(t % kTileTokens), (int)(left < kTileTokens ? left : kTileTokens));
  }
}

}  // namespace
