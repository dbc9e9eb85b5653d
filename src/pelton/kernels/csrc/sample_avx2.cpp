// Sampling's passes over a vocabulary with AVX2.
#include "sample_loops.h"

const pelton_sample_loops pelton_sample_loops_avx2 = {clean, weights, block_sum, count_above, at_least};
