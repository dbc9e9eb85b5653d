// The activation of a gate. Constant: GATED (silu 1, gelu 2, gelu_tanh 3, relu 4).
#pragma once

#ifndef DEVICE
#define DEVICE __device__ __forceinline__
#endif

DEVICE float activate(float v) {
    if (GATED == 1) return __fdividef(v, 1.0f + __expf(-v));
    if (GATED == 2) return 0.5f * v * (1.0f + erff(v * 0.7071067811865476f));
    if (GATED == 3) {
        const float u = 0.7978845608028654f * (v + 0.044715f * v * v * v);
        return 0.5f * v * (2.0f - __fdividef(2.0f, __expf(2.0f * u) + 1.0f));
    }
    return fmaxf(v, 0.0f);
}
