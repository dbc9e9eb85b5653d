// Activation functions of vectors, by kind (PELTON_STRING of its name).
#pragma once
#include "simd.h"

namespace {

template <uint32_t KIND>
inline vf activate(vf x) {
  switch (KIND) {
    case PELTON_STRING("silu"): return x * vsigmoid(x);
    case PELTON_STRING("gelu"): return x * vset(0.5f) * vone_plus_erf(x * vset(0.707106781f));
    case PELTON_STRING("gelu_tanh"): {
      // 0.5 x (1 + tanh(u)) = x sigmoid(2u), which does not cancel for x < 0.
      const vf u = x * vfma(x * x, vset(0.0356774081f), vset(0.797884561f));
      return x * vsigmoid(u + u);
    }
    default: return vmax(vset(0.0f), x);  // relu; NaN stays
  }
}

}  // namespace
