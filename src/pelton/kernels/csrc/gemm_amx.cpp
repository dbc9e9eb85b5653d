// Linear kernels for AVX-512 with VNNI and AMX's int8 tiles: they differ from AVX-512 for many tokens.
#define PELTON_GEMM_LEVEL PELTON_AMX
#define PELTON_GEMM_INT8_ONLY
#define PELTON_GEMM_AMX
#include "gemm_vec_avx512.h"
//
#include "gemm_amx.h"
//
#include "gemm_kernels.h"
