// What both ways of paged attention share: the call's operands and where keys lie.
#pragma once
#include "simd.h"

namespace {

struct Attention {
  const pelton_tensor *q, *k, *v, *table, *cu, *lens, *out, *k_scale, *v_scale, *sinks;
  float scale, cap;
  int64_t window, n_seqs, kv_heads, group, dim, block_size;

  explicit Attention(const pelton_call* c)
      : q(c->in[0]), k(c->in[1]), v(c->in[2]), table(c->in[3]), cu(c->in[4]), lens(c->in[5]), out(c->out[0]),
        k_scale(pelton_in(c, 6)), v_scale(pelton_in(c, 7)), sinks(pelton_in(c, 8)),
        scale((float)pelton_attr(c, 0, 1)), cap((float)pelton_attr(c, 2, 0)),
        window((int64_t)pelton_attr(c, 1, 0)), n_seqs(lens->shape[0]), kv_heads(k->shape[1]),
        group(q->shape[1] / k->shape[1]), dim(q->shape[2]), block_size(k->shape[2]) {}

  int64_t first_row(int64_t b) const { return ((const int32_t*)cu->data)[b]; }
  int64_t queries(int64_t b) const { return first_row(b + 1) - first_row(b); }
  int64_t seq_len(int64_t b) const { return ((const int32_t*)lens->data)[b]; }
  // First key that the query at `position` sees.
  int64_t first_key(int64_t position) const {
    return window > 0 && position >= window ? position - window + 1 : 0;
  }
  // What a KV head's scores, and its outputs, are multiplied with: codes of 8 bits have scales.
  float score_scale(int64_t head) const { return k_scale ? scale * ((const float*)k_scale->data)[head] : scale; }
  float value_scale(int64_t head) const { return v_scale ? ((const float*)v_scale->data)[head] : 1.0f; }
  // The sum of query head `head`'s softmax, of which `total` is without its sink, in units of exp(top). Infinite where
  // the sink is far above `top`: the head's output is then 0.
  float softmax_sum(int64_t head, float top, float total) const {
    return sinks ? total + expf(((const float*)sinks->data)[head] - top) : total;
  }
  const float* q_row(int64_t row, int64_t head) const {
    return (const float*)q->data + row * q->stride[0] + head * q->stride[1];
  }
  float* out_row(int64_t row, int64_t head) const {
    return (float*)out->data + row * out->stride[0] + head * out->stride[1];
  }
  // Element offsets of keys [begin, end) of sequence b in a cache. Only their blocks are looked up.
  void offsets(const pelton_tensor* cache, int64_t b, int64_t head, int64_t begin, int64_t end, int64_t* to) const {
    const int32_t* blocks = pelton_row_i32(table, b);
    for (int64_t p = begin; p < end;) {
      const int64_t in_block = p % block_size;
      int64_t at = blocks[p / block_size] * cache->stride[0] + head * cache->stride[1] + in_block * cache->stride[2];
      for (int64_t i = in_block; i < block_size && p < end; i++, p++, at += cache->stride[2]) *to++ = at;
    }
  }
};

// s = cap * tanh(s / cap), in place.
inline void cap_scores(float* s, int64_t n, float cap) {
  const vf c = vset(cap), inverse = vset(1.0f / cap);
  each_vector(n, [=](int64_t i, int k) { store_some(s + i, c * vtanh(load_some(s + i, k) * inverse), k); });
}

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

}  // namespace
