// embedding: rows of a table of any type, from either layout, as float32. A gather of a few kilobytes: plain C++.
#include "gemm_format.h"

namespace {

// ---- x16: value (row, k) is taken apart byte by byte -----------------------------------------------------
struct Place {
  const uint8_t* scales;  // of the panel
  const uint8_t* quants;  // of the block of 32 columns
  int64_t block;
  int row;
};

inline float half_at(const uint8_t* p, int row) {
  uint16_t bits;
  memcpy(&bits, p + 2 * row, 2);
  return pelton_f16_to_f32(bits);
}
inline float float_at(const uint8_t* p, int row) {
  float value;
  memcpy(&value, p + 4 * row, 4);
  return value;
}
// Four-bit value of column c < 32 of the block.
inline int nibble(const Place& p, int c) {
  const int byte = p.quants[(c % 16 / 4) * 64 + p.row * 4 + c % 4];
  return c < 16 ? byte & 15 : byte >> 4;
}

template <class Q>
void block_x16(const Place& p, float* out);

template <>
void block_x16<Q4_0>(const Place& p, float* out) {
  const float d = half_at(p.scales + p.block * 32, p.row);
  for (int c = 0; c < 32; c++) out[c] = d * (float)(nibble(p, c) - 8);
}
template <>
void block_x16<Q4_1>(const Place& p, float* out) {
  const float d = half_at(p.scales + p.block * 64, p.row), m = half_at(p.scales + p.block * 64 + 32, p.row);
  for (int c = 0; c < 32; c++) out[c] = d * (float)nibble(p, c) + m;
}
template <>
void block_x16<Q5_0>(const Place& p, float* out) {
  const float d = half_at(p.scales + p.block * 32, p.row);
  for (int c = 0; c < 32; c++) {
    const int fifth = p.quants[256 + p.row * 4 + c % 4] >> (c / 4) & 1;
    out[c] = d * (float)((nibble(p, c) | fifth << 4) - 16);
  }
}
template <>
void block_x16<Q8_0>(const Place& p, float* out) {
  const float d = half_at(p.scales + p.block * 32, p.row);
  for (int c = 0; c < 32; c++) out[c] = d * (float)(int8_t)p.quants[(c / 4) * 64 + p.row * 4 + c % 4];
}
template <>
void block_x16<Q4_K>(const Place& p, float* out) {
  const uint8_t* block = p.scales + p.block / 8 * Q4_K::kScaleBytes;
  const uint8_t* bytes = block + 64 + p.block % 8 * 16 + p.row;
  const float d = half_at(block, p.row) * (float)bytes[0], m = half_at(block + 32, p.row) * (float)bytes[128];
  for (int c = 0; c < 32; c++) out[c] = d * (float)nibble(p, c) - m;
}
template <>
void block_x16<Q6_K>(const Place& p, float* out) {
  const uint8_t* block = p.scales + p.block / 8 * Q6_K::kScaleBytes;
  const float d = half_at(block, p.row);
  for (int c = 0; c < 32; c++) {
    const int scale = (int8_t)block[32 + (p.block % 8 * 2 + c / 16) * 16 + p.row];
    const int high = p.quants[256 + c / 16 * 64 + p.row * 4 + c % 4] >> (c / 4 % 4 * 2) & 3;
    out[c] = d * (float)scale * (float)((nibble(p, c) | high << 4) - 32);
  }
}
template <class Q>
void group4_x16(const Place& p, float* out) {
  const uint8_t* group = p.scales + scale_offset<Q>(p.block);
  const float d = half_at(group, p.row), z = (float)group[32 + p.row];
  for (int c = 0; c < 32; c++) out[c] = d * ((float)nibble(p, c) - z);
}
template <class Q>
void group8_x16(const Place& p, float* out) {
  const uint8_t* group = p.scales + scale_offset<Q>(p.block);
  const float d = float_at(group, p.row), z = (float)(int8_t)group[64 + p.row];
  for (int c = 0; c < 32; c++) out[c] = d * ((float)(int8_t)p.quants[(c / 4) * 64 + p.row * 4 + c % 4] - z);
}
template <>
void block_x16<Int4G32>(const Place& p, float* out) { group4_x16<Int4G32>(p, out); }
template <>
void block_x16<Int4G64>(const Place& p, float* out) { group4_x16<Int4G64>(p, out); }
template <>
void block_x16<Int4G128>(const Place& p, float* out) { group4_x16<Int4G128>(p, out); }
template <>
void block_x16<Int8G32>(const Place& p, float* out) { group8_x16<Int8G32>(p, out); }
template <>
void block_x16<Int8G64>(const Place& p, float* out) { group8_x16<Int8G64>(p, out); }
template <>
void block_x16<Int8G128>(const Place& p, float* out) { group8_x16<Int8G128>(p, out); }
template <>
void block_x16<Int8Row>(const Place& p, float* out) {
  const float d = float_at(p.scales, p.row);
  for (int c = 0; c < 32; c++) out[c] = d * (float)(int8_t)p.quants[(c / 4) * 64 + p.row * 4 + c % 4];
}

template <class Q>
void row_x16(const uint8_t* w, int64_t row, int64_t k, float* out) {
  const uint8_t* panel = w + row / kPanelRows * panel_bytes<Q>(k);
  const uint8_t* quants = panel + scale_area<Q>(k);
  for (int64_t b = 0; b < k / 32; b++)
    block_x16<Q>(Place{panel, quants + b * Q::kQuantBytes, b, (int)(row % kPanelRows)}, out + b * 32);
}
template <int Dtype, int Bytes>
void dense_x16(const uint8_t* w, int64_t row, int64_t k, float* out) {
  const uint8_t* panel = w + row / kPanelRows * k * kPanelRows * Bytes;
  for (int64_t i = 0; i < k; i++) out[i] = pelton_load(panel, Dtype, i * kPanelRows + row % kPanelRows);
}

// ---- rows: blocks as they are ---------------------------------------------------------------------------------
inline void nibble_row(const uint8_t* qs, float d, float m, float* out) {
  for (int i = 0; i < 16; i++) {
    out[i] = d * (float)(qs[i] & 15) + m;
    out[i + 16] = d * (float)(qs[i] >> 4) + m;
  }
}

void row_q4_0(const uint8_t* w, int64_t row, int64_t k, float* out) {
  const uint8_t* b = w + row * (k / 32) * 18;
  for (int64_t i = 0; i < k / 32; i++, b += 18, out += 32) {
    const float d = half_at(b, 0);
    nibble_row(b + 2, d, -8 * d, out);
  }
}
void row_q4_1(const uint8_t* w, int64_t row, int64_t k, float* out) {
  const uint8_t* b = w + row * (k / 32) * 20;
  for (int64_t i = 0; i < k / 32; i++, b += 20, out += 32) nibble_row(b + 4, half_at(b, 0), half_at(b, 1), out);
}
void row_q5_0(const uint8_t* w, int64_t row, int64_t k, float* out) {
  const uint8_t* b = w + row * (k / 32) * 22;
  for (int64_t i = 0; i < k / 32; i++, b += 22, out += 32) {
    const float d = half_at(b, 0);
    for (int c = 0; c < 32; c++) {
      const int low = c < 16 ? b[6 + c] & 15 : b[6 + c - 16] >> 4, fifth = b[2 + c / 8] >> (c % 8) & 1;
      out[c] = d * (float)((low | fifth << 4) - 16);
    }
  }
}
void row_q8_0(const uint8_t* w, int64_t row, int64_t k, float* out) {
  const uint8_t* b = w + row * (k / 32) * 34;
  for (int64_t i = 0; i < k / 32; i++, b += 34, out += 32) {
    const float d = half_at(b, 0);
    for (int c = 0; c < 32; c++) out[c] = d * (float)(int8_t)b[2 + c];
  }
}
void row_q4_k(const uint8_t* w, int64_t row, int64_t k, float* out) {
  const uint8_t* b = w + row * (k / 256) * 144;
  for (int64_t i = 0; i < k / 256; i++, b += 144) {
    const float d = half_at(b, 0), dmin = half_at(b, 1);
    const uint8_t* s = b + 4;
    for (int j = 0; j < 8; j++, out += 32) {
      const int scale = j < 4 ? s[j] & 63 : (s[j + 4] & 15) | s[j - 4] >> 6 << 4;
      const int min = j < 4 ? s[j + 4] & 63 : s[j + 4] >> 4 | s[j] >> 6 << 4;
      const uint8_t* qs = b + 16 + j / 2 * 32;
      const float ds = d * (float)scale, m = dmin * (float)min;
      for (int c = 0; c < 32; c++) out[c] = ds * (float)(j % 2 ? qs[c] >> 4 : qs[c] & 15) - m;
    }
  }
}
void row_q6_k(const uint8_t* w, int64_t row, int64_t k, float* out) {
  const uint8_t* b = w + row * (k / 256) * 210;
  for (int64_t i = 0; i < k / 256; i++, b += 210, out += 256) {
    const float d = half_at(b + 208, 0);
    for (int c = 0; c < 256; c++) {
      const int in = c % 128, low = b[c / 128 * 64 + in % 64] >> (in < 64 ? 0 : 4) & 15;
      const int high = b[128 + c / 128 * 32 + in % 32] >> (in / 32 * 2) & 3;
      out[c] = d * (float)(int8_t)b[192 + c / 16] * (float)((low | high << 4) - 32);
    }
  }
}
template <int Group>
void row_group4(const uint8_t* w, int64_t row, int64_t k, float* out) {
  const uint8_t* b = w + row * (k / Group) * (3 + Group / 2);
  for (int64_t i = 0; i < k / Group; i++, b += 3 + Group / 2, out += Group) {
    const float d = half_at(b, 0), z = (float)b[2];
    for (int c = 0; c < Group / 2; c++) {
      out[c] = d * ((float)(b[3 + c] & 15) - z);
      out[c + Group / 2] = d * ((float)(b[3 + c] >> 4) - z);
    }
  }
}
template <int Group>
void row_group8(const uint8_t* w, int64_t row, int64_t k, float* out) {
  const uint8_t* b = w + row * (k / Group) * (5 + Group);
  for (int64_t i = 0; i < k / Group; i++, b += 5 + Group, out += Group) {
    const float d = float_at(b, 0), z = (float)b[4];
    for (int c = 0; c < Group; c++) out[c] = d * ((float)b[5 + c] - z);
  }
}
void row_int8(const uint8_t* w, int64_t row, int64_t k, float* out) {
  const uint8_t* b = w + row * (4 + k);
  for (int64_t c = 0; c < k; c++) out[c] = float_at(b, 0) * (float)(int8_t)b[4 + c];
}
template <int Dtype, int Bytes>
void dense_rows(const uint8_t* w, int64_t row, int64_t k, float* out) {
  for (int64_t i = 0; i < k; i++) out[i] = pelton_load(w + row * k * Bytes, Dtype, i);
}

// ids (T,) int32, weight (V, H) -> (T, H) float32. An id outside the table gives NaN, never a wild read.
template <void (*Row)(const uint8_t*, int64_t, int64_t, float*)>
void embedding(const pelton_call* call, pelton_team* team, int) {
  const pelton_tensor *ids = call->in[0], *w = call->in[1], *y = call->out[0];
  const int64_t k = w->shape[1];
  for (PELTON_EACH_CHUNK(team, ids->shape[0], 2, lo, hi))
    for (int64_t t = lo; t < hi; t++) {
      const int64_t id = *pelton_row_i32(ids, t);
      float* out = pelton_row_f32(y, t);
      if (id >= 0 && id < w->shape[0])
        Row((const uint8_t*)w->data, id, k, out);
      else
        for (int64_t i = 0; i < k; i++) out[i] = __builtin_nanf("");
    }
}

}  // namespace

PELTON_KERNEL("cpu.embedding.q4_0.x16", PELTON_GENERIC, (embedding<row_x16<Q4_0>>));
PELTON_KERNEL("cpu.embedding.q4_1.x16", PELTON_GENERIC, (embedding<row_x16<Q4_1>>));
PELTON_KERNEL("cpu.embedding.q5_0.x16", PELTON_GENERIC, (embedding<row_x16<Q5_0>>));
PELTON_KERNEL("cpu.embedding.q8_0.x16", PELTON_GENERIC, (embedding<row_x16<Q8_0>>));
PELTON_KERNEL("cpu.embedding.q4_k.x16", PELTON_GENERIC, (embedding<row_x16<Q4_K>>));
PELTON_KERNEL("cpu.embedding.q6_k.x16", PELTON_GENERIC, (embedding<row_x16<Q6_K>>));
PELTON_KERNEL("cpu.embedding.int4_g32.x16", PELTON_GENERIC, (embedding<row_x16<Int4G32>>));
PELTON_KERNEL("cpu.embedding.int4_g64.x16", PELTON_GENERIC, (embedding<row_x16<Int4G64>>));
PELTON_KERNEL("cpu.embedding.int4_g128.x16", PELTON_GENERIC, (embedding<row_x16<Int4G128>>));
PELTON_KERNEL("cpu.embedding.int8_g32.x16", PELTON_GENERIC, (embedding<row_x16<Int8G32>>));
PELTON_KERNEL("cpu.embedding.int8_g64.x16", PELTON_GENERIC, (embedding<row_x16<Int8G64>>));
PELTON_KERNEL("cpu.embedding.int8_g128.x16", PELTON_GENERIC, (embedding<row_x16<Int8G128>>));
PELTON_KERNEL("cpu.embedding.int8_row.x16", PELTON_GENERIC, (embedding<row_x16<Int8Row>>));
PELTON_KERNEL("cpu.embedding.float32.x16", PELTON_GENERIC, (embedding<dense_x16<PELTON_F32, 4>>));
PELTON_KERNEL("cpu.embedding.bfloat16.x16", PELTON_GENERIC, (embedding<dense_x16<PELTON_BF16, 2>>));
PELTON_KERNEL("cpu.embedding.float16.x16", PELTON_GENERIC, (embedding<dense_x16<PELTON_F16, 2>>));
PELTON_KERNEL("cpu.embedding.q4_0.rows", PELTON_GENERIC, embedding<row_q4_0>);
PELTON_KERNEL("cpu.embedding.q4_1.rows", PELTON_GENERIC, embedding<row_q4_1>);
PELTON_KERNEL("cpu.embedding.q5_0.rows", PELTON_GENERIC, embedding<row_q5_0>);
PELTON_KERNEL("cpu.embedding.q8_0.rows", PELTON_GENERIC, embedding<row_q8_0>);
PELTON_KERNEL("cpu.embedding.q4_k.rows", PELTON_GENERIC, embedding<row_q4_k>);
PELTON_KERNEL("cpu.embedding.q6_k.rows", PELTON_GENERIC, embedding<row_q6_k>);
PELTON_KERNEL("cpu.embedding.int4_g32.rows", PELTON_GENERIC, embedding<row_group4<32>>);
PELTON_KERNEL("cpu.embedding.int4_g64.rows", PELTON_GENERIC, embedding<row_group4<64>>);
PELTON_KERNEL("cpu.embedding.int4_g128.rows", PELTON_GENERIC, embedding<row_group4<128>>);
PELTON_KERNEL("cpu.embedding.int8_g32.rows", PELTON_GENERIC, embedding<row_group8<32>>);
PELTON_KERNEL("cpu.embedding.int8_g64.rows", PELTON_GENERIC, embedding<row_group8<64>>);
PELTON_KERNEL("cpu.embedding.int8_g128.rows", PELTON_GENERIC, embedding<row_group8<128>>);
PELTON_KERNEL("cpu.embedding.int8_row.rows", PELTON_GENERIC, embedding<row_int8>);
PELTON_KERNEL("cpu.embedding.float32.rows", PELTON_GENERIC, (embedding<dense_rows<PELTON_F32, 4>>));
PELTON_KERNEL("cpu.embedding.bfloat16.rows", PELTON_GENERIC, (embedding<dense_rows<PELTON_BF16, 2>>));
PELTON_KERNEL("cpu.embedding.float16.rows", PELTON_GENERIC, (embedding<dense_rows<PELTON_F16, 2>>));
