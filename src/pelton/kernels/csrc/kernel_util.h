// What every kernel file needs: registration, operand and attribute access. All `static inline`, so
// that each ISA level has its own copy.
#pragma once
#include <string.h>

#include "pelton.h"

// ---- Registration: constant data, no code runs at load -------------------------------------------
// PELTON_KERNEL("cpu.rms_norm", PELTON_AVX2, rms_norm) in the file of that level.
typedef struct pelton_kernel_row {
  const char* name;
  int level;
  pelton_kernel fn;
} pelton_kernel_row;

#define PELTON_JOIN_(a, b) a##b
#define PELTON_JOIN(a, b) PELTON_JOIN_(a, b)
#define PELTON_KERNEL(name, level, fn) PELTON_KERNEL_(name, level, fn, __COUNTER__)
#define PELTON_KERNEL_(name, level, fn, id)                                            \
  static const pelton_kernel_row PELTON_JOIN(pelton_row_, id) = {name, level, fn};     \
  __attribute__((used, section("pelton_kernels"))) static const pelton_kernel_row*     \
      PELTON_JOIN(pelton_row_pointer_, id) = &PELTON_JOIN(pelton_row_, id)

// ---- Attributes ----------------------------------------------------------------------------------
// A string attribute travels as its 32-bit FNV-1a hash: case PELTON_STRING("silu").
static constexpr uint32_t PELTON_STRING(const char* s) {
  uint32_t h = 2166136261u;
  while (*s) h = (h ^ (uint8_t)*s++) * 16777619u;
  return h;
}

static inline double pelton_attr(const pelton_call* c, int i, double absent) {
  return i < c->n_attrs ? c->attrs[i] : absent;
}
static inline uint32_t pelton_string_attr(const pelton_call* c, int i) {
  return i < c->n_attrs ? (uint32_t)c->attrs[i] : 0;
}
// Input i, or NULL when it is absent.
static inline const pelton_tensor* pelton_in(const pelton_call* c, int i) {
  return i < c->n_in ? c->in[i] : NULL;
}

// ---- Rows ----------------------------------------------------------------------------------------
static inline float* pelton_row_f32(const pelton_tensor* t, int64_t row) {
  return (float*)t->data + row * t->stride[0];
}
static inline const int32_t* pelton_row_i32(const pelton_tensor* t, int64_t row) {
  return (const int32_t*)t->data + row * t->stride[0];
}

// Splits n rows into chunks of `chunk`: for (PELTON_EACH_CHUNK(team, n, chunk, lo, hi)) runs the body
// with row ranges [lo, hi) claimed by this thread.
#define PELTON_EACH_CHUNK(team, n, chunk, lo, hi)                                            \
  int64_t lo, hi, n_chunks_ = ((n) + (chunk) - 1) / (chunk), c_ = pelton_claim(team, n_chunks_); \
  c_ >= 0 && (lo = c_ * (chunk), hi = lo + (chunk) < (n) ? lo + (chunk) : (n), true);            \
  c_ = pelton_claim(team, n_chunks_)

// ---- 16-bit floats, scalar (vector code has its own) ---------------------------------------------
static inline float pelton_bf16_to_f32(uint16_t h) {
  uint32_t u = (uint32_t)h << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
static inline uint16_t pelton_f32_to_bf16(float f) {  // to nearest even; NaN stays NaN
  uint32_t u;
  memcpy(&u, &f, 4);
  if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((u >> 16) | 0x40);
  return (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
static inline float pelton_f16_to_f32(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, e = (h >> 10) & 31, m = h & 0x3ff, u;
  float f;
  if (e == 31) {
    u = sign | 0x7f800000u | (m << 13);
  } else if (e) {
    u = sign | ((e + 112) << 23) | (m << 13);
  } else {
    f = (float)m * 5.9604644775390625e-8f;  // 2^-24
    return sign ? -f : f;
  }
  memcpy(&f, &u, 4);
  return f;
}
static inline uint16_t pelton_f32_to_f16(float f) {  // to nearest even; overflow to infinity
  uint32_t u;
  memcpy(&u, &f, 4);
  uint16_t sign = (uint16_t)((u >> 16) & 0x8000);
  u &= 0x7fffffffu;
  if (u > 0x7f800000u) return (uint16_t)(sign | 0x7e00 | ((u >> 13) & 0x3ff));
  if (u >= 0x477ff000u) return (uint16_t)(sign | 0x7c00);
  if (u < 0x38800000u) {  // subnormal: let the adder round at 2^-24
    float a;
    memcpy(&a, &u, 4);
    a += 0.5f;
    memcpy(&u, &a, 4);
    return (uint16_t)(sign | (u - 0x3f000000u));
  }
  u += 0xfff + ((u >> 13) & 1);
  return (uint16_t)(sign | ((u - 0x38000000u) >> 13));
}
// e4m3: shifted into a float32's place, the exponent is 120 too small; subnormals come out right as well.
static inline float pelton_f8_to_f32(uint8_t b) {
  const uint32_t u = (uint32_t)(b & 0x80) << 24 | (uint32_t)(b & 0x7f) << 20;
  float f;
  memcpy(&f, &u, 4);
  return (b & 0x7f) == 0x7f ? __builtin_nanf("") : f * 0x1p120f;
}
static inline uint8_t pelton_f32_to_f8(float f) {  // to nearest even; beyond 448 the largest
  uint32_t u;
  memcpy(&u, &f, 4);
  const uint8_t sign = (uint8_t)(u >> 24 & 0x80);
  u &= 0x7fffffffu;
  if (u > 0x7f800000u) return (uint8_t)(sign | 0x7f);
  if (u >= 0x43e00000u) return (uint8_t)(sign | 0x7e);
  if (u < 0x3c800000u) {  // subnormal: let the adder round at 2^-9
    float a;
    memcpy(&a, &u, 4);
    a += 16384.0f;
    memcpy(&u, &a, 4);
    return (uint8_t)(sign | (u - 0x46800000u));
  }
  u += 0x7ffff + ((u >> 20) & 1);
  return (uint8_t)(sign | ((u - 0x3c000000u) >> 20));
}
static inline int64_t pelton_item_size(int32_t dtype) {
  return dtype == PELTON_F32 ? 4 : dtype == PELTON_I8 || dtype == PELTON_F8 ? 1 : 2;
}
static inline float pelton_load(const void* p, int32_t dtype, int64_t i) {
  switch (dtype) {
    case PELTON_I8: return (float)((const int8_t*)p)[i];
    case PELTON_F8: return pelton_f8_to_f32(((const uint8_t*)p)[i]);
    case PELTON_F32: return ((const float*)p)[i];
    case PELTON_BF16: return pelton_bf16_to_f32(((const uint16_t*)p)[i]);
    default: return pelton_f16_to_f32(((const uint16_t*)p)[i]);
  }
}
static inline void pelton_store(void* p, int32_t dtype, int64_t i, float v) {
  switch (dtype) {
    case PELTON_F32: ((float*)p)[i] = v; break;
    case PELTON_BF16: ((uint16_t*)p)[i] = pelton_f32_to_bf16(v); break;
    default: ((uint16_t*)p)[i] = pelton_f32_to_f16(v); break;
  }
}
