// Registers of 8 rows: AVX2, with AVX-VNNI's byte products where the file is compiled for it.
#pragma once
#include <immintrin.h>
#include <stdint.h>

#include "gemm_format.h"

#define PELTON_INLINE __attribute__((always_inline)) inline

namespace {

using I = __m256i;  // 8 rows x 4 bytes, or 8 x int32
using F = __m256;   // 8 rows, float32
constexpr int kLanes = 8;
// Tokens of a tile with int8 and with float32 activations: what the registers hold.
constexpr int kTileTokens = 4, kTileTokensF32 = 6;

PELTON_INLINE I load(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
PELTON_INLINE void store(void* p, I v) { _mm256_storeu_si256((__m256i*)p, v); }
PELTON_INLINE F load_f32(const float* p) { return _mm256_loadu_ps(p); }
PELTON_INLINE void store_f32(float* p, F v) { _mm256_storeu_ps(p, v); }
PELTON_INLINE F load_f16(const void* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
PELTON_INLINE F load_bf16(const void* p) {
  return _mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
PELTON_INLINE F load_u8(const void* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
PELTON_INLINE F load_i8(const void* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
PELTON_INLINE I mask_rows(int64_t n) {  // the first n lanes
  return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
PELTON_INLINE F load_f32(const float* p, int64_t n) { return _mm256_maskload_ps(p, mask_rows(n)); }
PELTON_INLINE void store_f32(float* p, F v, int64_t n) { _mm256_maskstore_ps(p, mask_rows(n), v); }

PELTON_INLINE I spread4(const void* p) { return _mm256_set1_epi32(*(const int32_t*)p); }
PELTON_INLINE F spread(const float* p) { return _mm256_broadcast_ss(p); }
PELTON_INLINE F constant(float v) { return _mm256_set1_ps(v); }
PELTON_INLINE F zero() { return _mm256_setzero_ps(); }
PELTON_INLINE F add(F a, F b) { return _mm256_add_ps(a, b); }
PELTON_INLINE F mul(F a, F b) { return _mm256_mul_ps(a, b); }
PELTON_INLINE F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
PELTON_INLINE F to_float(I v) { return _mm256_cvtepi32_ps(v); }
PELTON_INLINE I add(I a, I b) { return _mm256_add_epi32(a, b); }

PELTON_INLINE I low_nibbles(I v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
PELTON_INLINE I high_nibbles(I v) { return low_nibbles(_mm256_srli_epi16(v, 4)); }
// Bits [from, from + width) of every byte of v, moved to bit `to`.
PELTON_INLINE I move_bits(I v, int from, int width, int to) {
  I moved = from < to ? _mm256_slli_epi32(v, to - from) : _mm256_srli_epi32(v, from - to);
  return _mm256_and_si256(moved, _mm256_set1_epi8((char)(((1 << width) - 1) << to)));
}
PELTON_INLINE I bit_or(I a, I b) { return _mm256_or_si256(a, b); }
// Column j of each 4-byte group as float, from unsigned or signed bytes.
PELTON_INLINE F column_u8(I v, int j) {
  return to_float(_mm256_and_si256(_mm256_srli_epi32(v, 8 * j), _mm256_set1_epi32(255)));
}
PELTON_INLINE F column_i8(I v, int j) {
  return to_float(_mm256_srai_epi32(_mm256_slli_epi32(v, 24 - 8 * j), 24));
}

// Sums of products of a type's quants with int8 activations x in [-127, 127], four columns at a time; add<n> is
// the n-th of them, `halves` points to the sums of x over the block's halves. Exact: int16 sums are widened
// before they could overflow (2 * 127 * (2^kBits - 1) * adds < 2^15).
#ifdef __AVXVNNI__
template <class Q>
struct Dot {
  I sum32;
  PELTON_INLINE void start(const uint8_t* halves, int half) {
    constexpr int zero = Q::kBits == 8 ? 128 : Q::kZero;
    sum32 = zero ? _mm256_madd_epi16(spread4(halves), _mm256_set1_epi32(halves_times<Q>(half, -zero)))
                 : _mm256_setzero_si256();
  }
  PELTON_INLINE void add(int n, I w, I x) {
    if (Q::kBits == 8) w = _mm256_xor_si256(w, _mm256_set1_epi8((char)0x80));
    sum32 = _mm256_dpbusd_avx_epi32(sum32, w, x);
  }
  PELTON_INLINE I sum(const uint8_t*, int) const { return sum32; }
};
#else
template <class Q>
struct Dot {
  static constexpr int kAdds = Q::kBits == 4 ? 8 : Q::kBits == 5 ? 4 : Q::kBits == 6 ? 2 : 1;
  I sum16, sum32;
  PELTON_INLINE void start(const uint8_t*, int) {}
  PELTON_INLINE void add(int n, I w, I x) {
    I p = Q::kBits == 8 ? _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w))
                        : _mm256_maddubs_epi16(w, x);
    sum16 = n % kAdds == 0 ? p : _mm256_add_epi16(sum16, p);
    // Add here and now: GCC would otherwise make all products first and spill them to memory.
    asm("" : "+x"(sum16));
    if ((n + 1) % kAdds == 0) {
      I wide = _mm256_madd_epi16(sum16, _mm256_set1_epi16(1));
      sum32 = n < kAdds ? wide : _mm256_add_epi32(sum32, wide);
      asm("" : "+x"(sum32));
    }
  }
  PELTON_INLINE I sum(const uint8_t* halves, int half) const {
    if (!Q::kZero) return sum32;
    const I times = _mm256_set1_epi32(halves_times<Q>(half, -Q::kZero));
    return _mm256_add_epi32(sum32, _mm256_madd_epi16(spread4(halves), times));
  }
};
#endif

}  // namespace
