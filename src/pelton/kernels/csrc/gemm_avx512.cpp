// Linear kernels for AVX-512 with VNNI.
#define PELTON_GEMM_LEVEL PELTON_AVX512
#include "gemm_vec_avx512.h"
//
#include "gemm_kernels.h"
