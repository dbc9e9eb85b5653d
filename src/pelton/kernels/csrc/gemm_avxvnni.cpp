// Linear kernels for AVX-VNNI (256 bits): the byte products differ from AVX2.
#define PELTON_GEMM_LEVEL PELTON_AVXVNNI
#define PELTON_GEMM_INT8_ONLY
#include "gemm_vec_avx2.h"
//
#include "gemm_kernels.h"
