// Attention sinks: a logit of each query head that joins its softmax and attends to nothing (gpt-oss: OpenAI, 2025).
//
// Constant: SINKS (whether there are such; they are then the kernel's last parameter).
#pragma once
#include "hopper.cuh"

#if SINKS
#define SINKS_PARAMETER , const float* sinks
#define SINKS_GIVEN sinks
#else
#define SINKS_PARAMETER
#define SINKS_GIVEN static_cast<const float*>(nullptr)
#endif

// The sum of a head's softmax, of which `sum` is without the sink, in units of 2 to the power of `best`, its largest
// score times log2(e). Infinite where the sink is far above it, or where there is no key: what is divided by it is 0.
DEVICE float with_sink(float sum, const float* sink, float best) {
    constexpr float log2_e = 1.4426950408889634f;
    return SINKS ? sum + exp2_fast(*sink * log2_e - best) : sum;
}
