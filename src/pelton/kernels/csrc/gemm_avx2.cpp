// Linear kernels for AVX2.
#define PELTON_GEMM_LEVEL PELTON_AVX2
#include "gemm_vec_avx2.h"
//
#include "gemm_kernels.h"
