#define PELTON_MEASURE_LEVEL PELTON_AVXVNNI
#include "gemm_vec_avx2.h"
//
#include "measure.inl"
