// Registers of 16 rows: AVX-512 with VNNI.
#pragma once
// GCC's own headers pass undefined registers on purpose; inlined here, they warn.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#include <stdint.h>

#include "gemm_format.h"

#define PELTON_INLINE __attribute__((always_inline)) inline

namespace {

using I = __m512i;  // 16 rows x 4 bytes, or 16 x int32
using F = __m512;   // 16 rows, float32
constexpr int kLanes = 16;
// Tokens of a tile with int8 and with float32 activations: what the registers hold, and enough chains of byte
// products to hide one's latency.
constexpr int kTileTokens = 8, kTileTokensF32 = 8;

PELTON_INLINE I load(const void* p) { return _mm512_loadu_si512(p); }
PELTON_INLINE void store(void* p, I v) { _mm512_storeu_si512(p, v); }
PELTON_INLINE F load_f32(const float* p) { return _mm512_loadu_ps(p); }
PELTON_INLINE void store_f32(float* p, F v) { _mm512_storeu_ps(p, v); }
PELTON_INLINE F load_f16(const void* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
PELTON_INLINE F load_bf16(const void* p) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
PELTON_INLINE F load_u8(const void* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
PELTON_INLINE F load_i8(const void* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
PELTON_INLINE __mmask16 mask_rows(int64_t n) { return n >= 16 ? 0xffff : n <= 0 ? 0 : (1u << n) - 1; }
PELTON_INLINE F load_f32(const float* p, int64_t n) { return _mm512_maskz_loadu_ps(mask_rows(n), p); }
PELTON_INLINE void store_f32(float* p, F v, int64_t n) { _mm512_mask_storeu_ps(p, mask_rows(n), v); }

PELTON_INLINE I spread4(const void* p) { return _mm512_set1_epi32(*(const int32_t*)p); }
PELTON_INLINE F spread(const float* p) { return _mm512_set1_ps(*p); }
PELTON_INLINE F constant(float v) { return _mm512_set1_ps(v); }
PELTON_INLINE F zero() { return _mm512_setzero_ps(); }
PELTON_INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
PELTON_INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
PELTON_INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
PELTON_INLINE F to_float(I v) { return _mm512_cvtepi32_ps(v); }
PELTON_INLINE I add(I a, I b) { return _mm512_add_epi32(a, b); }

PELTON_INLINE I low_nibbles(I v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
PELTON_INLINE I high_nibbles(I v) { return low_nibbles(_mm512_srli_epi16(v, 4)); }
// Bits [from, from + width) of every byte of v, moved to bit `to`.
PELTON_INLINE I move_bits(I v, int from, int width, int to) {
  I moved = from < to ? _mm512_slli_epi32(v, (unsigned)(to - from)) : _mm512_srli_epi32(v, (unsigned)(from - to));
  return _mm512_and_si512(moved, _mm512_set1_epi8((char)(((1 << width) - 1) << to)));
}
PELTON_INLINE I bit_or(I a, I b) { return _mm512_or_si512(a, b); }
// Column j of each 4-byte group as float, from unsigned or signed bytes.
PELTON_INLINE F column_u8(I v, int j) {
  return to_float(_mm512_and_si512(_mm512_srli_epi32(v, (unsigned)(8 * j)), _mm512_set1_epi32(255)));
}
PELTON_INLINE F column_i8(I v, int j) {
  return to_float(_mm512_srai_epi32(_mm512_slli_epi32(v, (unsigned)(24 - 8 * j)), 24));
}

// Sums of products of a type's quants with int8 activations x, four columns at a time, exact; `halves` points
// to the sums of x over the block's halves. Signed bytes are taken as unsigned ones with a zero point of 128.
template <class Q>
struct Dot {
  I sum32;
  PELTON_INLINE void start(const uint8_t* halves, int half) {
    constexpr int zero = Q::kBits == 8 ? 128 : Q::kZero;
    sum32 = zero ? _mm512_madd_epi16(spread4(halves), _mm512_set1_epi32(halves_times<Q>(half, -zero)))
                 : _mm512_setzero_si512();
  }
  PELTON_INLINE void add(int, I w, I x) {
    if (Q::kBits == 8) w = _mm512_xor_si512(w, _mm512_set1_epi8((char)0x80));
    sum32 = _mm512_dpbusd_epi32(sum32, w, x);
  }
  PELTON_INLINE I sum(const uint8_t*, int) const { return sum32; }
};

}  // namespace
