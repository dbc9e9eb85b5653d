// The linear kernels of one ISA level. A file defines PELTON_GEMM_LEVEL, includes its gemm_vec_*.h,
// then this.
#pragma once
#include "gemm_f32.h"

PELTON_KERNEL("cpu.linear.q4_0.x16.int8", PELTON_GEMM_LEVEL, linear_int8<Q4_0>);
PELTON_KERNEL("cpu.linear.q4_1.x16.int8", PELTON_GEMM_LEVEL, linear_int8<Q4_1>);
PELTON_KERNEL("cpu.linear.q5_0.x16.int8", PELTON_GEMM_LEVEL, linear_int8<Q5_0>);
PELTON_KERNEL("cpu.linear.q8_0.x16.int8", PELTON_GEMM_LEVEL, linear_int8<Q8_0>);
PELTON_KERNEL("cpu.linear.q4_k.x16.int8", PELTON_GEMM_LEVEL, linear_int8<Q4_K>);
PELTON_KERNEL("cpu.linear.q6_k.x16.int8", PELTON_GEMM_LEVEL, linear_int8<Q6_K>);

#ifndef PELTON_GEMM_INT8_ONLY
PELTON_KERNEL("cpu.linear.q4_0.x16.f32", PELTON_GEMM_LEVEL, linear_f32<Q4_0>);
PELTON_KERNEL("cpu.linear.q4_1.x16.f32", PELTON_GEMM_LEVEL, linear_f32<Q4_1>);
PELTON_KERNEL("cpu.linear.q5_0.x16.f32", PELTON_GEMM_LEVEL, linear_f32<Q5_0>);
PELTON_KERNEL("cpu.linear.q8_0.x16.f32", PELTON_GEMM_LEVEL, linear_f32<Q8_0>);
PELTON_KERNEL("cpu.linear.q4_k.x16.f32", PELTON_GEMM_LEVEL, linear_f32<Q4_K>);
PELTON_KERNEL("cpu.linear.q6_k.x16.f32", PELTON_GEMM_LEVEL, linear_f32<Q6_K>);
PELTON_KERNEL("cpu.linear.float32.x16", PELTON_GEMM_LEVEL, linear_f32<Float32>);
PELTON_KERNEL("cpu.linear.bfloat16.x16", PELTON_GEMM_LEVEL, linear_f32<BFloat16>);
PELTON_KERNEL("cpu.linear.float16.x16", PELTON_GEMM_LEVEL, linear_f32<Float16>);
#endif
