// The bodies of pelton_sample_loops: plain loops that the compiler vectorises for each level.
#pragma once
#include <math.h>
#include <string.h>

#include "sample.h"

namespace {

float clean(const float* in, float* out, int64_t n) {
  float top[16];
  for (int j = 0; j < 16; j++) top[j] = -INFINITY;
  int64_t i = 0;
  for (; i + 16 <= n; i += 16)
    for (int j = 0; j < 16; j++) {
      const float v = in[i + j] == in[i + j] ? in[i + j] : -INFINITY;
      out[i + j] = v;
      top[j] = v > top[j] ? v : top[j];
    }
  for (; i < n; i++) {
    out[i] = in[i] == in[i] ? in[i] : -INFINITY;
    top[0] = out[i] > top[0] ? out[i] : top[0];
  }
  for (int j = 1; j < 16; j++) top[0] = top[j] > top[0] ? top[j] : top[0];
  return top[0];
}

void weights(const float* l, float* w, int64_t n, float top, float t) {
  for (int64_t i = 0; i < n; i++) {
    const float x = (l[i] - top) / t, safe = x > -87.0f ? x : -87.0f;
    const float k = (safe * 1.44269504f + 12582912.0f) - 12582912.0f;  // to nearest, ties to even
    const float r = safe - k * 0.693359375f - k * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 0.5f;
    const float y = p * (r * r) + r + 1.0f;
    const int32_t bits = ((int32_t)k + 127) << 23;
    float scale;
    memcpy(&scale, &bits, 4);
    w[i] = x < -87.0f ? 0.0f : y * scale;
  }
}

double block_sum(const float* w, int64_t n) {
  double lane[16] = {0};
  int64_t i = 0;
  for (; i + 16 <= n; i += 16)
    for (int j = 0; j < 16; j++) lane[j] += (double)w[i + j];
  for (int j = 0; i + j < n; j++) lane[j] += (double)w[i + j];
  double sum = lane[0];
  for (int j = 1; j < 16; j++) sum += lane[j];
  return sum;
}

int64_t count_above(const float* l, int64_t n, float v) {
  int64_t count = 0;
  for (int64_t i = 0; i < n; i++) count += l[i] > v;
  return count;
}

int64_t at_least(const float* l, int64_t n, float v, int32_t* out) {
  int64_t count = 0;
  for (int64_t i = 0; i < n; i += 64) {
    const int64_t end = i + 64 < n ? i + 64 : n;
    int any = 0;
    for (int64_t j = i; j < end; j++) any |= l[j] >= v;
    if (!any) continue;
    for (int64_t j = i; j < end; j++)
      if (l[j] >= v) out[count++] = (int32_t)j;
  }
  return count;
}

}  // namespace
