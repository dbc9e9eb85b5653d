// Linear kernels for any CPU.
#define PELTON_GEMM_LEVEL PELTON_GENERIC
#include "gemm_vec_generic.h"
//
#include "gemm_kernels.h"
