#define PELTON_MEASURE_LEVEL PELTON_GENERIC
#include "gemm_vec_generic.h"
//
#include "measure.inl"
