#define PELTON_MEASURE_LEVEL PELTON_AVX2
#include "gemm_vec_avx2.h"
//
#include "measure.inl"
