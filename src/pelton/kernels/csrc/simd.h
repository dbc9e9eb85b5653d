// One spelling of vectors for all ISA levels: `vf` is LANES floats. A kernel body (*.inl) written
// with it is compiled once per level, by x.cpp, x_avx2.cpp and x_avx512.cpp, and registers at
// PELTON_SIMD_LEVEL.
//
// Everything is in an anonymous namespace: each level keeps its own copy. Fused multiply-adds happen
// only where vfma is written. `load_n`/`store_n` touch n < LANES elements and nothing beyond, so a
// tail computes exactly what a full vector does.
#pragma once
#include <math.h>

#include "kernel_util.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
// ---- 512 bits ------------------------------------------------------------------------------------
#define PELTON_SIMD_LEVEL PELTON_AVX512
constexpr int LANES = 16;
typedef __m512 vf;
typedef __mmask16 vmask;

inline vf vset(float x) { return _mm512_set1_ps(x); }
inline vf load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, vf v) { _mm512_storeu_ps(p, v); }
inline vmask lanes_below(int n) { return (vmask)((1u << n) - 1); }
inline vf load_n(const float* p, int n) { return _mm512_maskz_loadu_ps(lanes_below(n), p); }
inline void store_n(float* p, vf v, int n) { _mm512_mask_storeu_ps(p, lanes_below(n), v); }
inline vf vfma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
inline vf vfnma(vf a, vf b, vf c) { return _mm512_fnmadd_ps(a, b, c); }
inline vf vmax(vf a, vf b) { return _mm512_max_ps(a, b); }  // b where either is NaN
inline vf vmin(vf a, vf b) { return _mm512_min_ps(a, b); }
inline vf vabs(vf a) { return _mm512_abs_ps(a); }
inline vf vsqrt(vf a) { return _mm512_sqrt_ps(a); }
inline vmask vnan(vf a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
inline vf vround(vf a) { return _mm512_roundscale_ps(a, 8); }  // to nearest even, no exceptions
inline vmask vless(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
inline vf vselect(vmask m, vf a, vf b) { return _mm512_mask_blend_ps(m, b, a); }  // m ? a : b
inline vf vcopysign(vf a, vf sign) {
  const __m512i s = _mm512_set1_epi32((int)0x80000000);
  return _mm512_castsi512_ps(_mm512_or_si512(_mm512_andnot_si512(s, _mm512_castps_si512(a)),
                                             _mm512_and_si512(s, _mm512_castps_si512(sign))));
}
inline vf vexp2i(vf n) {  // 2^n for integral n in [-126, 127]
  const __m512i bits = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
  return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 23));
}
inline float hsum(vf v) {
  const __m256 a = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
inline float hmax(vf v) { return _mm512_reduce_max_ps(v); }
inline vf load_bf16(const uint16_t* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline vf load_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }

#elif defined(__AVX2__)
// ---- 256 bits ------------------------------------------------------------------------------------
#define PELTON_SIMD_LEVEL PELTON_AVX2
constexpr int LANES = 8;
typedef __m256 vf;
typedef __m256 vmask;

inline vf vset(float x) { return _mm256_set1_ps(x); }
inline vf load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, vf v) { _mm256_storeu_ps(p, v); }
inline __m256i lanes_below(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline vf load_n(const float* p, int n) { return _mm256_maskload_ps(p, lanes_below(n)); }
inline void store_n(float* p, vf v, int n) { _mm256_maskstore_ps(p, lanes_below(n), v); }
inline vf vfma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
inline vf vfnma(vf a, vf b, vf c) { return _mm256_fnmadd_ps(a, b, c); }
inline vf vmax(vf a, vf b) { return _mm256_max_ps(a, b); }
inline vf vmin(vf a, vf b) { return _mm256_min_ps(a, b); }
inline vf vabs(vf a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
inline vf vsqrt(vf a) { return _mm256_sqrt_ps(a); }
inline vmask vnan(vf a) { return _mm256_cmp_ps(a, a, _CMP_UNORD_Q); }
inline vf vround(vf a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline vmask vless(vf a, vf b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
inline vf vselect(vmask m, vf a, vf b) { return _mm256_blendv_ps(b, a, m); }
inline vf vcopysign(vf a, vf sign) {
  const vf s = _mm256_set1_ps(-0.0f);
  return _mm256_or_ps(_mm256_andnot_ps(s, a), _mm256_and_ps(s, sign));
}
inline vf vexp2i(vf n) {
  const __m256i bits = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 23));
}
inline float hsum(vf v) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
inline float hmax(vf v) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}
inline vf load_bf16(const uint16_t* p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline vf load_f16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }

#else
// ---- 128 bits, any machine: the compiler's vector extension ---------------------------------------
#define PELTON_SIMD_LEVEL PELTON_GENERIC
constexpr int LANES = 4;
typedef float vf __attribute__((vector_size(16)));
typedef int32_t vmask __attribute__((vector_size(16)));

inline vf vset(float x) { return vf{x, x, x, x}; }
inline vf load(const float* p) {
  vf v;
  memcpy(&v, p, sizeof v);
  return v;
}
inline void store(float* p, vf v) { memcpy(p, &v, sizeof v); }
inline vf load_n(const float* p, int n) {
  vf v = {};
  for (int i = 0; i < n; i++) v[i] = p[i];
  return v;
}
inline void store_n(float* p, vf v, int n) {
  for (int i = 0; i < n; i++) p[i] = v[i];
}
inline vf vselect(vmask m, vf a, vf b) { return (vf)(((vmask)a & m) | ((vmask)b & ~m)); }
inline vf vfma(vf a, vf b, vf c) { return a * b + c; }
inline vf vfnma(vf a, vf b, vf c) { return c - a * b; }
inline vf vmax(vf a, vf b) { return vselect(a > b, a, b); }
inline vf vmin(vf a, vf b) { return vselect(a < b, a, b); }
inline vf vabs(vf a) { return (vf)((vmask)a & 0x7fffffff); }
inline vf vsqrt(vf a) { return vf{sqrtf(a[0]), sqrtf(a[1]), sqrtf(a[2]), sqrtf(a[3])}; }
inline vmask vnan(vf a) { return a != a; }
inline vf vround(vf a) {
  const vf magic = vset(12582912.0f);  // 1.5 * 2^23: adding it rounds |a| < 2^22
  return (a + magic) - magic;
}
inline vmask vless(vf a, vf b) { return a < b; }
inline vf vcopysign(vf a, vf sign) {
  return (vf)(((vmask)a & 0x7fffffff) | ((vmask)sign & (int32_t)0x80000000));
}
inline vf vexp2i(vf n) { return (vf)((__builtin_convertvector(n, vmask) + 127) << 23); }
inline float hsum(vf v) { return (v[0] + v[2]) + (v[1] + v[3]); }
inline float hmax(vf v) { return fmaxf(fmaxf(v[0], v[1]), fmaxf(v[2], v[3])); }
inline vf load_bf16(const uint16_t* p) {
  vf v;
  for (int i = 0; i < LANES; i++) v[i] = pelton_bf16_to_f32(p[i]);
  return v;
}
inline vf load_f16(const uint16_t* p) {
  vf v;
  for (int i = 0; i < LANES; i++) v[i] = pelton_f16_to_f32(p[i]);
  return v;
}
#endif

// Bytes as floats: whole numbers, and e4m3 (kernel_util.h says how).
#if defined(__AVX512F__)
inline vf load_i8(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
inline vf load_f8(const uint8_t* p) {
  const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
  const __m512i size = _mm512_and_si512(wide, _mm512_set1_epi32(0x7f));
  const __m512i bits = _mm512_or_si512(_mm512_slli_epi32(_mm512_xor_si512(wide, size), 24), _mm512_slli_epi32(size, 20));
  const vf value = _mm512_mul_ps(_mm512_castsi512_ps(bits), vset(0x1p120f));
  return _mm512_mask_blend_ps(_mm512_cmpeq_epi32_mask(size, _mm512_set1_epi32(0x7f)), value, vset(NAN));
}
#elif defined(__AVX2__)
inline vf load_i8(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
inline vf load_f8(const uint8_t* p) {
  const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
  const __m256i size = _mm256_and_si256(wide, _mm256_set1_epi32(0x7f));
  const __m256i bits = _mm256_or_si256(_mm256_slli_epi32(_mm256_xor_si256(wide, size), 24), _mm256_slli_epi32(size, 20));
  const vf value = _mm256_mul_ps(_mm256_castsi256_ps(bits), vset(0x1p120f));
  const __m256i odd = _mm256_cmpeq_epi32(size, _mm256_set1_epi32(0x7f));
  return _mm256_blendv_ps(value, vset(NAN), _mm256_castsi256_ps(odd));
}
#else
inline vf load_i8(const int8_t* p) { return vf{(float)p[0], (float)p[1], (float)p[2], (float)p[3]}; }
inline vf load_f8(const uint8_t* p) {
  return vf{pelton_f8_to_f32(p[0]), pelton_f8_to_f32(p[1]), pelton_f8_to_f32(p[2]), pelton_f8_to_f32(p[3])};
}
#endif

// ---- Loads of any float dtype --------------------------------------------------------------------
template <int DTYPE>
inline vf load_as(const void* base, int64_t i) {
  if (DTYPE == PELTON_F32) return load((const float*)base + i);
  if (DTYPE == PELTON_I8) return load_i8((const int8_t*)base + i);
  if (DTYPE == PELTON_F8) return load_f8((const uint8_t*)base + i);
  if (DTYPE == PELTON_BF16) return load_bf16((const uint16_t*)base + i);
  return load_f16((const uint16_t*)base + i);
}
template <int DTYPE>
inline vf load_n_as(const void* base, int64_t i, int n) {
  if (DTYPE == PELTON_F32) return load_n((const float*)base + i, n);
  if (DTYPE == PELTON_I8 || DTYPE == PELTON_F8) {
    uint8_t bytes[LANES] = {0};
    memcpy(bytes, (const uint8_t*)base + i, (size_t)n);
    return load_as<DTYPE>(bytes, 0);
  }
  uint16_t part[LANES] = {0};
  for (int j = 0; j < n; j++) part[j] = ((const uint16_t*)base)[i + j];
  return DTYPE == PELTON_BF16 ? load_bf16(part) : load_f16(part);
}

// NaN where either is NaN, as torch.maximum (vmax and vmin give b).
inline vf vmax_nan(vf a, vf b) { return vselect(vnan(a), a, vmax(a, b)); }
inline vf vmin_nan(vf a, vf b) { return vselect(vnan(a), a, vmin(a, b)); }

// ---- Elementary functions ------------------------------------------------------------------------
// exp = 2^n * e^r, n = round(x / ln 2), |r| <= ln(2) / 2; e^r by a fitted polynomial (3e-9).
inline vf exp_reduced(vf x, vf* n) {
  *n = vround(x * vset(1.44269504f));
  vf r = vfnma(*n, vset(0.693145752f), x);  // ln 2 in two parts
  r = vfnma(*n, vset(1.42860677e-6f), r);
  vf p = vset(1.39517174e-3f);
  p = vfma(p, r, vset(8.36959854e-3f));
  p = vfma(p, r, vset(4.16661873e-2f));
  p = vfma(p, r, vset(1.66665122e-1f));
  p = vfma(p, r, vset(0.5f));
  return vfma(p * r, r, r) + vset(1.0f);
}

// About 1 ulp; 0 and infinity where they are due, NaN for NaN.
inline vf vexp(vf x) {
  x = vmax(vset(-104.0f), vmin(vset(89.0f), x));
  vf n;
  const vf p = exp_reduced(x, &n);
  const vf half = vround(n * vset(0.5f));  // 2^n in two factors: n leaves the range of one
  return p * vexp2i(half) * vexp2i(n - half);
}

// For x <= 0, the softmax's case; exactly 0 below -87.
inline vf vexp_negative(vf x) {
  vf n;
  const vf p = exp_reduced(vmax(vset(-87.0f), x), &n);
  return vselect(vless(x, vset(-87.0f)), vset(0.0f), p * vexp2i(n));
}

// |x| < 0.625: a polynomial, so that small arguments keep their relative precision.
inline vf vtanh(vf x) {
  const vf a = vabs(x), z = x * x;
  vf p = vset(-5.71703678e-3f);
  p = vfma(p, z, vset(2.06505787e-2f));
  p = vfma(p, z, vset(-5.37434965e-2f));
  p = vfma(p, z, vset(1.33314908e-1f));
  p = vfma(p, z, vset(-3.33332837e-1f));
  const vf small = vfma(p * z, x, x);
  const vf big = vset(1.0f) - vset(2.0f) / (vexp(a + a) + vset(1.0f));
  return vselect(vless(a, vset(0.625f)), small, vcopysign(big, x));
}

// 1 + erf(x) without cancellation for x < 0: erfc(|x|) = e^P(|x|) from |x| = 1 on.
inline vf vone_plus_erf(vf x) {
  const vf a = vmin(vset(10.0f), vabs(x)), z = x * x;
  vf p = vset(7.88911566e-5f);
  p = vfma(p, z, vset(-8.02083989e-4f));
  p = vfma(p, z, vset(5.18953521e-3f));
  p = vfma(p, z, vset(-2.68544443e-2f));
  p = vfma(p, z, vset(1.12836003e-1f));
  p = vfma(p, z, vset(-3.76126260e-1f));
  p = vfma(p, z, vset(1.12837911f));
  const vf small = vfma(p, x, vset(1.0f));
  vf q = vset(-2.16868501e-5f);
  q = vfma(q, a, vset(4.41336364e-4f));
  q = vfma(q, a, vset(-4.20456193e-3f));
  q = vfma(q, a, vset(2.52082571e-2f));
  q = vfma(q, a, vset(-1.08418576e-1f));
  q = vfma(q, a, vset(-6.33219898e-1f));
  q = vfma(q, a, vset(-1.12957847f));
  q = vfma(q, a, vset(1.88040227e-4f));
  const vf tail = vexp(q);
  const vf big = vselect(vless(x, vset(0.0f)), tail, vset(2.0f) - tail);
  return vselect(vless(a, vset(1.0f)), small, big);
}

inline vf vsigmoid(vf x) { return vset(1.0f) / (vset(1.0f) + vexp(vset(0.0f) - x)); }

// ---- Rows ----------------------------------------------------------------------------------------
// A tensor as rows of its last axis (which is dense), whatever the strides of the others.
inline int64_t rows_of(const pelton_tensor* t) {
  int64_t n = 1;
  for (int i = 0; i + 1 < t->ndim; i++) n *= t->shape[i];
  return n;
}
inline int64_t row_offset(const pelton_tensor* t, int64_t row) {
  int64_t offset = 0;
  for (int i = t->ndim - 2; i > 0; i--) {
    offset += row % t->shape[i] * t->stride[i];
    row /= t->shape[i];
  }
  return t->ndim > 1 ? offset + row * t->stride[0] : 0;
}
inline float* row_of(const pelton_tensor* t, int64_t row) { return (float*)t->data + row_offset(t, row); }
inline int64_t last_dim(const pelton_tensor* t) { return t->ndim ? t->shape[t->ndim - 1] : 1; }

// Calls f(i, n) for the vectors of [0, n_elements): n is LANES but for a tail.
template <class F>
inline void each_vector(int64_t n_elements, F f) {
  int64_t i = 0;
  for (; i + LANES <= n_elements; i += LANES) f(i, LANES);
  if (i < n_elements) f(i, (int)(n_elements - i));
}
inline vf load_some(const float* p, int n) { return n == LANES ? load(p) : load_n(p, n); }
inline void store_some(float* p, vf v, int n) {
  if (n == LANES)
    store(p, v);
  else
    store_n(p, v, n);
}

}  // namespace
