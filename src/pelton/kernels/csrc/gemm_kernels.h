// The linear kernels of one ISA level. A file defines PELTON_GEMM_LEVEL, includes its gemm_vec_*.h,
// then this.
#pragma once
#include "gemm_f32.h"
#include "gemm_int8.h"
#include "gemm_linear.h"

// The same kernels take float32 rows (linear) and quantised ones (linear_q8).
#define PELTON_LINEAR_INT8_(name, suffix, M)                                                       \
  PELTON_KERNEL("cpu.linear." name ".x16.int8" suffix, PELTON_GEMM_LEVEL, linear<M>);             \
  PELTON_KERNEL("cpu.linear_q8." name ".x16" suffix, PELTON_GEMM_LEVEL, linear<M>);               \
  PELTON_KERNEL("cpu.linear_gated." name ".x16.int8" suffix, PELTON_GEMM_LEVEL, linear_gated<M>); \
  PELTON_KERNEL("cpu.linear_gated_q8." name ".x16" suffix, PELTON_GEMM_LEVEL, linear_gated<M>)
#define PELTON_LINEAR_INT8(name, Q)                      \
  using Few##Q = Int8<Q, 8>;                             \
  using Many##Q = Int8<Q, 1>;                            \
  PELTON_LINEAR_INT8_(name, "", Few##Q);                 \
  PELTON_LINEAR_INT8_(name, ".unpacked", Many##Q)
#define PELTON_LINEAR_F32(name, W)                                                   \
  PELTON_KERNEL("cpu.linear." name, PELTON_GEMM_LEVEL, linear<Float<W>>);              \
  PELTON_KERNEL("cpu.linear_gated." name, PELTON_GEMM_LEVEL, linear_gated<Float<W>>)

PELTON_LINEAR_INT8("q4_0", Q4_0);
PELTON_LINEAR_INT8("q4_1", Q4_1);
PELTON_LINEAR_INT8("q5_0", Q5_0);
PELTON_LINEAR_INT8("q8_0", Q8_0);
PELTON_LINEAR_INT8("q4_k", Q4_K);
PELTON_LINEAR_INT8("q6_k", Q6_K);
PELTON_LINEAR_INT8("int4_g32", Int4G32);
PELTON_LINEAR_INT8("int4_g64", Int4G64);
PELTON_LINEAR_INT8("int4_g128", Int4G128);
PELTON_LINEAR_INT8("int8_g32", Int8G32);
PELTON_LINEAR_INT8("int8_g64", Int8G64);
PELTON_LINEAR_INT8("int8_g128", Int8G128);
PELTON_LINEAR_INT8("int8_row", Int8Row);

#ifndef PELTON_GEMM_INT8_ONLY
PELTON_LINEAR_F32("q4_0.x16.f32", Q4_0);
PELTON_LINEAR_F32("q4_1.x16.f32", Q4_1);
PELTON_LINEAR_F32("q5_0.x16.f32", Q5_0);
PELTON_LINEAR_F32("q8_0.x16.f32", Q8_0);
PELTON_LINEAR_F32("q4_k.x16.f32", Q4_K);
PELTON_LINEAR_F32("q6_k.x16.f32", Q6_K);
PELTON_LINEAR_F32("int4_g32.x16.f32", Int4G32);
PELTON_LINEAR_F32("int4_g64.x16.f32", Int4G64);
PELTON_LINEAR_F32("int4_g128.x16.f32", Int4G128);
PELTON_LINEAR_F32("int8_g32.x16.f32", Int8G32);
PELTON_LINEAR_F32("int8_g64.x16.f32", Int8G64);
PELTON_LINEAR_F32("int8_g128.x16.f32", Int8G128);
PELTON_LINEAR_F32("int8_row.x16.f32", Int8Row);
PELTON_LINEAR_F32("float32.x16", Float32);
PELTON_LINEAR_F32("bfloat16.x16", BFloat16);
PELTON_LINEAR_F32("float16.x16", Float16);
#endif
