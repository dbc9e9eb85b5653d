// Linear kernels for any CPU: for correctness, so not worth a long compilation.
#pragma GCC optimize("O2")
#define PELTON_GEMM_LEVEL PELTON_GENERIC
#include "gemm_vec_generic.h"
//
#include "gemm_kernels.h"
