// paged_attention: causal attention of packed queries over the paged cache.
//
// A sequence with one query (decode) and one with several (prefill, chunks) take different ways, by
// its own number of queries alone; keys are always cut at fixed positions (multiples of kChunk or
// kTile) and combined in order. So a row's result depends neither on the other sequences of the step
// nor on the number of threads.
#include "attention_decode.h"
#include "attention_prefill.h"

namespace {

struct Work {
  int64_t prefill_items = 0;  // (sequence, query tile, kv head)
  int64_t decodes = 0;        // sequences with one query
  int64_t max_chunks = 0;     // of key chunks of those
  bool split = false;         // share a sequence's chunks among the threads
};

inline int64_t partial_floats(const Attention& a) { return a.group * (a.dim + 2); }

inline Work plan_work(const Attention& a, const pelton_call* c, int team_size) {
  Work w;
  for (int64_t b = 0; b < a.n_seqs; b++) {
    const int64_t n = a.queries(b);
    if (n > 1) w.prefill_items += query_tiles(a, n) * a.kv_heads;
    if (n != 1) continue;
    w.decodes++;
    const int64_t last = a.seq_len(b) - 1, chunks = last / kChunk - a.first_key(last) / kChunk + 1;
    w.max_chunks = chunks > w.max_chunks ? chunks : w.max_chunks;
  }
  const int64_t needed = w.decodes * a.kv_heads * w.max_chunks * partial_floats(a) * (int64_t)sizeof(float);
  w.split = team_size > 1 && w.max_chunks > 1 && w.decodes * a.kv_heads < 4 * team_size &&
            needed <= c->workspace_bytes;
  return w;
}

// The sequence of prefill item `i` (which becomes its index within the sequence).
inline int64_t find_prefill(const Attention& a, int64_t* i) {
  for (int64_t b = 0;; b++) {
    const int64_t n = a.queries(b);
    if (n < 2) continue;
    const int64_t items = query_tiles(a, n) * a.kv_heads;
    if (*i < items) return b;
    *i -= items;
  }
}

inline int64_t find_decode(const Attention& a, int64_t i) {
  for (int64_t b = 0;; b++)
    if (a.queries(b) == 1 && i-- == 0) return b;
}

template <int DTYPE>
void run(const Attention& a, const pelton_call* c, pelton_team* team, int thread) {
  float* scratch = (float*)pelton_scratch(team, thread);
  const Work w = plan_work(a, c, pelton_team_size(team));
  float* partials = (float*)c->workspace;
  const int64_t per_seq = a.kv_heads * (w.split ? w.max_chunks : 1);

  for (int64_t i; (i = pelton_claim(team, w.prefill_items + w.decodes * per_seq)) >= 0;) {
    if (i < w.prefill_items) {
      const int64_t b = find_prefill(a, &i);
      const int64_t tiles = query_tiles(a, a.queries(b));
      prefill_tile<DTYPE>(a, b, i % a.kv_heads, tiles - 1 - i / a.kv_heads, scratch);  // longest first
      continue;
    }
    i -= w.prefill_items;
    const int64_t b = find_decode(a, i / per_seq), head = i % per_seq % a.kv_heads;
    if (!w.split) {
      decode_head<DTYPE>(a, b, head, scratch);
      continue;
    }
    const int64_t last = a.seq_len(b) - 1, chunk = a.first_key(last) / kChunk + i % per_seq / a.kv_heads;
    if (chunk * kChunk <= last) decode_chunk<DTYPE>(a, b, head, chunk, partials + i * partial_floats(a), scratch);
  }
  if (!w.split) return;

  pelton_barrier(team, thread);
  for (int64_t i; (i = pelton_claim(team, w.decodes * a.kv_heads)) >= 0;) {
    const int64_t d = i / a.kv_heads, b = find_decode(a, d), head = i % a.kv_heads;
    const int64_t last = a.seq_len(b) - 1, chunks = last / kChunk - a.first_key(last) / kChunk + 1;
    float* first = partials + (d * per_seq + head) * partial_floats(a);
    for (int64_t k = 1; k < chunks; k++) merge(a, first, first + k * a.kv_heads * partial_floats(a));
    write_output(a, b, head, first);
  }
}

// in: q (T, Hq, D), k_cache, v_cache (blocks, Hkv, block_size, D), block_table (B, M), cu_seqlens
// (B+1), seq_lens (B), [k_scale, v_scale (Hkv), sinks (Hq)]. out: (T, Hq, D). attrs: scale, window, softcap.
void paged_attention(const pelton_call* c, pelton_team* team, int thread) {
  const Attention a(c);
  switch (a.k->dtype) {
    case PELTON_F32: return run<PELTON_F32>(a, c, team, thread);
    case PELTON_BF16: return run<PELTON_BF16>(a, c, team, thread);
    case PELTON_I8: return run<PELTON_I8>(a, c, team, thread);
    case PELTON_F8: return run<PELTON_F8>(a, c, team, thread);
    default: return run<PELTON_F16>(a, c, team, thread);
  }
}

}  // namespace

PELTON_KERNEL("cpu.paged_attention", PELTON_SIMD_LEVEL, paged_attention);
