// Values as 8-bit codes, the nearest; beyond the largest code, that. Needs hopper.cuh.
#pragma once

// Two floats as e4m3, `low` in the low byte.
DEVICE u32 to_e4m3(float low, float high) {
    unsigned short y;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(high), "f"(low));
    return y;
}

// The same of TYPE 1 (0: nothing); of 2 as int8, -127 to 127.
template <int TYPE>
DEVICE u32 to_codes(float low, float high) {
    if (TYPE == 1) return to_e4m3(low, high);
    const int a = max(-127, min(127, __float2int_rn(low))), b = max(-127, min(127, __float2int_rn(high)));
    return (a & 255) | (b & 255) << 8;
}
