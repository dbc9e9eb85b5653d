// rope_cos_sin, rope, kv_write, rope_kv_write: rotations and the paged cache.
#include "simd.h"

namespace {

constexpr int64_t kTokensPerClaim = 4;

// in: positions (T) int32, inv_freq (R/2). out: (T, R) = [cos, sin] * scale. attrs: scale.
void rope_cos_sin(const pelton_call* c, pelton_team* team, int thread) {
  const pelton_tensor *positions = c->in[0], *out = c->out[0];
  const float* inv_freq = (const float*)c->in[1]->data;
  const int64_t half = c->in[1]->shape[0];
  const float scale = (float)pelton_attr(c, 0, 1);
  for (PELTON_EACH_CHUNK(team, positions->shape[0], kTokensPerClaim, lo, hi)) {
    for (int64_t t = lo; t < hi; t++) {
      const float position = (float)*pelton_row_i32(positions, t);
      float* row = row_of(out, t);
      for (int64_t i = 0; i < half; i++) {
        const float angle = position * inv_freq[i];
        row[i] = cosf(angle) * scale;
        row[half + i] = sinf(angle) * scale;
      }
    }
  }
}

// y = rotation of x: (a, b) -> (a cos - b sin, b cos + a sin), a and b the halves of the first
// `rotary` elements; the rest passes. `x` may be `y`.
inline void rotate(const float* x, const float* cos_sin, float* y, int64_t rotary, int64_t dim) {
  const int64_t half = rotary / 2;
  each_vector(half, [=](int64_t i, int n) {
    const vf a = load_some(x + i, n), b = load_some(x + half + i, n);
    const vf cos = load_some(cos_sin + i, n), sin = load_some(cos_sin + half + i, n);
    store_some(y + i, a * cos - b * sin, n);
    store_some(y + half + i, b * cos + a * sin, n);
  });
  if (x != y)
    for (int64_t i = rotary; i < dim; i++) y[i] = x[i];
}

// y = x / rms(x) * weight.
inline void normalise(const float* x, const float* weight, float eps, float* y, int64_t dim) {
  vf sum = vset(0);
  each_vector(dim, [&](int64_t i, int n) {
    const vf v = load_some(x + i, n);
    sum = vfma(v, v, sum);
  });
  const vf s = vset(1.0f / sqrtf(hsum(sum) / (float)dim + eps));
  each_vector(dim, [=](int64_t i, int n) {
    store_some(y + i, load_some(x + i, n) * s * load_some(weight + i, n), n);
  });
}

// in: x (T, heads, D), cos_sin (T, R).
void rope(const pelton_call* c, pelton_team* team, int thread) {
  const pelton_tensor *x = c->in[0], *cos_sin = c->in[1], *y = c->out[0];
  for (PELTON_EACH_CHUNK(team, x->shape[0], kTokensPerClaim, lo, hi))
    for (int64_t t = lo; t < hi; t++)
      for (int64_t h = 0; h < x->shape[1]; h++)
        rotate(pelton_row_f32(x, t) + h * x->stride[1], pelton_row_f32(cos_sin, t),
               pelton_row_f32(y, t) + h * y->stride[1], cos_sin->shape[1], x->shape[2]);
}

inline int64_t slot_offset(const pelton_tensor* cache, int64_t slot, int64_t head) {
  const int64_t size = cache->shape[2];
  return slot / size * cache->stride[0] + head * cache->stride[1] + slot % size * cache->stride[2];
}

// Asks for a slot's lines, to be written soon: the stores of one token would wait for one line after the other.
inline void fetch_slot(const pelton_tensor* cache, int64_t slot) {
  const int64_t item = pelton_item_size(cache->dtype);
  for (int64_t h = 0; h < cache->shape[1]; h++) {
    const char* at = (const char*)cache->data + slot_offset(cache, slot, h) * item;
    for (int64_t i = 0; i < cache->shape[3] * item; i += 64) __builtin_prefetch(at + i, 1);
  }
}

// Rounds one of the codes to its other neighbour where that brings scores nearer (ir/kv_codes.py, look_again).
inline void look_again(float* x, int64_t dim, bool f8, const float* along, uint8_t* codes) {
  const float largest = f8 ? 448.0f : 127.0f;
  float code[PELTON_MAX_HEAD_DIM], score = 0;
  for (int64_t i = 0; i < dim; i++) {
    code[i] = f8 ? pelton_f8_to_f32(codes[i]) : (float)(int8_t)codes[i];
    x[i] = code[i] - (x[i] > largest ? largest : x[i] < -largest ? -largest : x[i]);  // the error
    score += x[i] * along[i];
  }
  float best = 0, other = 0;
  int64_t at = -1;
  for (int64_t i = 0; i < dim; i++) {
    float step = 1;
    if (f8) {
      const float a = fabsf(code[i]) > 0x1p-6f ? fabsf(code[i]) : 0x1p-6f;
      uint32_t bits;
      memcpy(&bits, &a, 4);
      bits = (bits & 0x7f800000u) - 0x1800000u;
      memcpy(&step, &bits, 4);
    }
    const float e = x[i], move = e > 0 ? -step : e < 0 ? step : 0, u = move * along[i];
    const float change = u * (2 * score + u) + move * (2 * e + move) * along[dim + i];
    if (change < best && fabsf(code[i] + move) <= largest) {
      best = change;
      at = i;
      other = code[i] + move;
    }
  }
  if (at >= 0) codes[at] = f8 ? pelton_f32_to_f8(other) : (uint8_t)(int8_t)other;
}

// x over the head's scale as codes of 8 bits; `queries`: none, or (heads, 2 D).
inline void store_codes(const pelton_tensor* cache, int64_t at, int64_t head, const pelton_tensor* scales, const float* x,
                        const pelton_tensor* queries) {
  const float scale = scales ? ((const float*)scales->data)[head] : 1.0f;
  float units[PELTON_MAX_HEAD_DIM];
  uint8_t* to = (uint8_t*)cache->data + at;
  for (int64_t i = 0; i < cache->shape[3]; i++) {
    const float v = units[i] = x[i] / scale;
    if (cache->dtype == PELTON_F8) {
      to[i] = pelton_f32_to_f8(v);
    } else {
      const float in_range = v > 127 ? 127 : v < -127 ? -127 : v == v ? v : 0;
      to[i] = (uint8_t)(int8_t)lrintf(in_range);
    }
  }
  const int64_t dim = cache->shape[3];
  if (queries) look_again(units, dim, cache->dtype == PELTON_F8, (const float*)queries->data + head * 2 * dim, to);
}

// Stores one head's vector, less `shifts` (heads, D), in the cache (blocks, heads, block_size, D) at `slot`.
inline void store_slot(const pelton_tensor* cache, int64_t slot, int64_t head, const pelton_tensor* scales,
                       const float* x, const pelton_tensor* shifts = nullptr,
                       const pelton_tensor* queries = nullptr) {
  const int64_t dim = cache->shape[3], at = slot_offset(cache, slot, head);
  float shifted[PELTON_MAX_HEAD_DIM];
  if (shifts) {
    const float* shift = (const float*)shifts->data + head * dim;
    for (int64_t i = 0; i < dim; i++) shifted[i] = x[i] - shift[i];
    x = shifted;
  }
  if (cache->dtype == PELTON_F32) {
    memcpy((float*)cache->data + at, x, dim * sizeof(float));
    return;
  }
  if (pelton_item_size(cache->dtype) == 1) return store_codes(cache, at, head, scales, x, queries);
  uint16_t* to = (uint16_t*)cache->data + at;
  int64_t i = 0;
#if defined(__AVX2__)
  if (cache->dtype == PELTON_F16)
    for (; i + 8 <= dim; i += 8)
      _mm_storeu_si128((__m128i*)(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
#endif
  for (; i < dim; i++)
    to[i] = cache->dtype == PELTON_BF16 ? pelton_f32_to_bf16(x[i]) : pelton_f32_to_f16(x[i]);
}

// in: k, v (T, Hkv, D), k_cache, v_cache, slot_mapping (T) int32, [k_scale, v_scale (Hkv), k_shift (Hkv, D),
// k_queries (Hkv, 2 D)]; a slot of -1 writes nothing.
void kv_write(const pelton_call* c, pelton_team* team, int thread) {
  const pelton_tensor *k = c->in[0], *v = c->in[1], *k_cache = c->in[2], *v_cache = c->in[3];
  for (PELTON_EACH_CHUNK(team, k->shape[0], kTokensPerClaim, lo, hi)) {
    for (int64_t t = lo; t < hi; t++) {
      const int64_t slot = *pelton_row_i32(c->in[4], t);
      if (slot < 0) continue;
      for (int64_t h = 0; h < k->shape[1]; h++) {
        store_slot(k_cache, slot, h, pelton_in(c, 5), pelton_row_f32(k, t) + h * k->stride[1], pelton_in(c, 7),
                   pelton_in(c, 8));
        store_slot(v_cache, slot, h, pelton_in(c, 6), pelton_row_f32(v, t) + h * v->stride[1]);
      }
    }
  }
}

// in: q (T, Hq, D), k, v (T, Hkv, D), cos_sin (T, R), k_cache, v_cache, slot_mapping,
// [q_weight (D), k_weight (D), k_scale, v_scale (Hkv), k_shift (Hkv, D), k_queries (Hkv, 2 D)].
// out: rotated q. attrs: eps.
void rope_kv_write(const pelton_call* c, pelton_team* team, int thread) {
  const pelton_tensor *q = c->in[0], *k = c->in[1], *v = c->in[2], *cos_sin = c->in[3];
  const pelton_tensor *k_cache = c->in[4], *v_cache = c->in[5], *y = c->out[0];
  const pelton_tensor *q_weight = pelton_in(c, 7), *k_weight = pelton_in(c, 8);
  const pelton_tensor *k_scale = pelton_in(c, 9), *v_scale = pelton_in(c, 10);
  const int64_t rotary = cos_sin->shape[1], dim = q->shape[2];
  const float eps = (float)pelton_attr(c, 0, 0);
  float rotated[PELTON_MAX_HEAD_DIM];
  for (PELTON_EACH_CHUNK(team, q->shape[0], kTokensPerClaim, lo, hi)) {
    for (int64_t t = lo; t < hi; t++) {
      const float* rotation = pelton_row_f32(cos_sin, t);
      const int64_t slot = *pelton_row_i32(c->in[6], t);
      if (slot >= 0) {
        fetch_slot(k_cache, slot);
        fetch_slot(v_cache, slot);
      }
      for (int64_t h = 0; h < q->shape[1]; h++) {
        const float* x = pelton_row_f32(q, t) + h * q->stride[1];
        float* o = pelton_row_f32(y, t) + h * y->stride[1];
        if (q_weight) {
          normalise(x, (const float*)q_weight->data, eps, o, dim);
          x = o;
        }
        rotate(x, rotation, o, rotary, dim);
      }
      if (slot < 0) continue;
      for (int64_t h = 0; h < k->shape[1]; h++) {
        const float* x = pelton_row_f32(k, t) + h * k->stride[1];
        if (k_weight) {
          normalise(x, (const float*)k_weight->data, eps, rotated, dim);
          x = rotated;
        }
        rotate(x, rotation, rotated, rotary, dim);
        store_slot(k_cache, slot, h, k_scale, rotated, pelton_in(c, 11), pelton_in(c, 12));
        store_slot(v_cache, slot, h, v_scale, pelton_row_f32(v, t) + h * v->stride[1]);
      }
    }
  }
}

}  // namespace

PELTON_KERNEL("cpu.rope_cos_sin", PELTON_SIMD_LEVEL, rope_cos_sin);
PELTON_KERNEL("cpu.rope", PELTON_SIMD_LEVEL, rope);
PELTON_KERNEL("cpu.kv_write", PELTON_SIMD_LEVEL, kv_write);
PELTON_KERNEL("cpu.rope_kv_write", PELTON_SIMD_LEVEL, rope_kv_write);
