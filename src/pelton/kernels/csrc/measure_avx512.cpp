#define PELTON_MEASURE_LEVEL PELTON_AVX512
#include "gemm_vec_avx512.h"
//
#include "measure.inl"
