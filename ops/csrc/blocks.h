// Decoding of packed weights: one function per type, the only place in C++ where a type is decoded. Knows no torch.
//
// Every packed type is an integer times scales: element = (d * scale) * q - dmin * min, or d * q + m; constants of a
// type's definition such as 1/8 are powers of two and part of d. The Python twin is ops/blocks.py (layouts and source
// there); the order in which a product folds these parts is written in ops/quant_linear.py.
//
//   Block32   32 elements of a type on the lattices Q8_0 and Q8_1 (a block, or a part of one)
//   Block256  256 elements, one block, of a type on the lattice Q8_K
//   expand<types::Q4_0>(row, b, out)   decodes the b-th 32 (or 256) elements of a row
//   dequantize_row(qtype, row, K, y)   f32, bit for bit what gguf-py gives
//
// All of it lives in an anonymous namespace, because it is compiled once per instruction set.
#pragma once
#include <cstdint>
#include <cstring>

#include "generated/ggml_types.h"
#include "half.h"

namespace dasllama {
namespace {

struct Block32 {
  int8_t q[32];
  float d[2];  // of elements 0 to 15 and 16 to 31: they differ in NVFP4 only
  float m;     // added; 0 on the lattice Q8_0
};

struct Block256 {
  int8_t q[256];
  int16_t scale[16];  // of 16 elements each; 1 where the type has none
  int16_t min[16];    // set only where has_min
  float d, dmin;      // dmin likewise
};

constexpr bool has_min(int qtype) { return qtype == types::Q2_K || qtype == types::Q4_K || qtype == types::Q5_K; }

// ---- shared pieces --------------------------------------------------------------------------------------------------

// 4-bit fields of `width` bytes: the low ones, then the high ones.
inline void nibbles(const uint8_t* p, int width, int8_t* q) {
  for (int i = 0; i < width; i++) {
    q[i] = p[i] & 15;
    q[i + width] = p[i] >> 4;
  }
}

// 2-bit fields of 32 bytes: the lowest of each byte, then the next higher of each, and so on; 128 in all.
inline void crumbs(const uint8_t* p, int8_t* q) {
  for (int shift = 0; shift < 8; shift += 2)
    for (int i = 0; i < 32; i++) *q++ = p[i] >> shift & 3;
}

// Minus where the bit is set, for 8 elements.
inline void negate(int8_t* q, uint32_t bits) {
  for (int i = 0; i < 8; i++) q[i] = (bits >> i & 1) ? -q[i] : q[i];
}

// Seven sign bits (in each byte); the eighth makes the number of minuses even.
inline uint32_t even_signs(uint32_t seven) {
  uint32_t parity = seven ^ seven >> 4;
  parity ^= parity >> 2;
  parity ^= parity >> 1;
  return seven | (parity & 0x01010101) << 7;
}

inline void set_d(Block32& out, const uint8_t* f16) {
  out.d[0] = out.d[1] = load_f16(f16);
  out.m = 0;
}

// One scale for 32 elements.
inline void set_pair(int16_t* of16, int i, int value) { of16[2 * i] = of16[2 * i + 1] = static_cast<int16_t>(value); }

// ---- 32 elements ----------------------------------------------------------------------------------------------------

template <int qtype>
void expand(const uint8_t* row, int64_t b, Block32& out);

template <>
inline void expand<types::Q4_0>(const uint8_t* row, int64_t b, Block32& out) {
  const uint8_t* p = row + b * 18;
  set_d(out, p);
  nibbles(p + 2, 16, out.q);
  for (int8_t& q : out.q) q -= 8;
}

template <>
inline void expand<types::Q4_1>(const uint8_t* row, int64_t b, Block32& out) {
  const uint8_t* p = row + b * 20;
  set_d(out, p);
  out.m = load_f16(p + 2);
  nibbles(p + 4, 16, out.q);
}

template <>
inline void expand<types::Q5_0>(const uint8_t* row, int64_t b, Block32& out) {
  const uint8_t* p = row + b * 22;
  set_d(out, p);
  nibbles(p + 6, 16, out.q);
  const uint32_t high = load_u32(p + 2);
  for (int i = 0; i < 32; i++) out.q[i] += (high >> i & 1) * 16 - 16;
}

template <>
inline void expand<types::Q5_1>(const uint8_t* row, int64_t b, Block32& out) {
  const uint8_t* p = row + b * 24;
  set_d(out, p);
  out.m = load_f16(p + 2);
  nibbles(p + 8, 16, out.q);
  const uint32_t high = load_u32(p + 4);
  for (int i = 0; i < 32; i++) out.q[i] += (high >> i & 1) * 16;
}

template <>
inline void expand<types::Q8_0>(const uint8_t* row, int64_t b, Block32& out) {
  const uint8_t* p = row + b * 34;
  set_d(out, p);
  std::memcpy(out.q, p + 2, 32);
}

template <>
inline void expand<types::Q1_0>(const uint8_t* row, int64_t b, Block32& out) {  // blocks of 128
  const uint8_t* p = row + b / 4 * 18;
  set_d(out, p);
  const uint32_t bits = load_u32(p + 2 + b % 4 * 4);
  for (int i = 0; i < 32; i++) out.q[i] = (bits >> i & 1) * 2 - 1;
}

template <>
inline void expand<types::Q2_0>(const uint8_t* row, int64_t b, Block32& out) {  // blocks of 64
  const uint8_t* p = row + b / 2 * 18;
  set_d(out, p);
  p += 2 + b % 2 * 8;
  for (int i = 0; i < 32; i++) out.q[i] = (p[i / 4] >> i % 4 * 2 & 3) - 1;
}

template <>
inline void expand<types::IQ4_NL>(const uint8_t* row, int64_t b, Block32& out) {
  const uint8_t* p = row + b * 18;
  set_d(out, p);
  nibbles(p + 2, 16, out.q);
  for (int8_t& q : out.q) q = IQ4_VALUES[q];
}

// 2^(e - 128): FP4_VALUES are doubled. 0 and 1 give subnormals, 255 the number 2^127.
inline float mxfp4_scale(uint8_t e) { return as_float(e < 2 ? 0x00200000u << e : (e - 1u) << 23); }

template <>
inline void expand<types::MXFP4>(const uint8_t* row, int64_t b, Block32& out) {
  const uint8_t* p = row + b * 17;
  out.d[0] = out.d[1] = mxfp4_scale(p[0]);
  out.m = 0;
  nibbles(p + 1, 16, out.q);
  for (int8_t& q : out.q) q = FP4_VALUES[q];
}

// e4m3 without its sign bit, halved as above; 0x7F is 0.
inline float nvfp4_scale(uint8_t byte) {
  const uint32_t e = byte >> 3 & 15, mantissa = byte & 7;
  if (byte == 0x7F) return 0;
  if (e == 0) return static_cast<float>(mantissa) * 0x1p-10f;
  return as_float((e + 119) << 23 | mantissa << 20);
}

template <>
inline void expand<types::NVFP4>(const uint8_t* row, int64_t b, Block32& out) {  // blocks of 64, a scale per 16
  const uint8_t* p = row + b / 2 * 36;
  const int half = b % 2;
  out.d[0] = nvfp4_scale(p[2 * half]);
  out.d[1] = nvfp4_scale(p[2 * half + 1]);
  out.m = 0;
  nibbles(p + 4 + 16 * half, 8, out.q);
  nibbles(p + 12 + 16 * half, 8, out.q + 16);
  for (int8_t& q : out.q) q = FP4_VALUES[q];
}

// ---- 256 elements ---------------------------------------------------------------------------------------------------

template <int qtype>
void expand(const uint8_t* row, int64_t b, Block256& out);

template <>
inline void expand<types::Q2_K>(const uint8_t* row, int64_t b, Block256& out) {
  const uint8_t* p = row + b * 84;
  out.d = load_f16(p + 80);
  out.dmin = load_f16(p + 82);
  for (int g = 0; g < 16; g++) {
    out.scale[g] = p[g] & 15;
    out.min[g] = p[g] >> 4;
  }
  crumbs(p + 16, out.q);
  crumbs(p + 48, out.q + 128);
}

template <>
inline void expand<types::Q3_K>(const uint8_t* row, int64_t b, Block256& out) {
  const uint8_t* p = row + b * 110;
  out.d = load_f16(p + 108);
  for (int g = 0; g < 16; g++)
    out.scale[g] = ((p[96 + g % 8] >> g / 8 * 4 & 15) | (p[104 + g % 4] >> g / 4 * 2 & 3) << 4) - 32;
  crumbs(p + 32, out.q);
  crumbs(p + 64, out.q + 128);
  for (int i = 0; i < 256; i++) out.q[i] += (p[i % 32] >> i / 32 & 1) * 4 - 4;
}

// The 12 bytes of Q4_K and Q5_K: 8 scales and 8 mins of 6 bits.
inline void six_bit(const uint8_t* p, Block256& out) {
  for (int g = 0; g < 4; g++) {
    set_pair(out.scale, g, p[g] & 63);
    set_pair(out.min, g, p[g + 4] & 63);
    set_pair(out.scale, g + 4, (p[g + 8] & 15) | (p[g] >> 6) << 4);
    set_pair(out.min, g + 4, p[g + 8] >> 4 | (p[g + 4] >> 6) << 4);
  }
}

template <>
inline void expand<types::Q4_K>(const uint8_t* row, int64_t b, Block256& out) {
  const uint8_t* p = row + b * 144;
  out.d = load_f16(p);
  out.dmin = load_f16(p + 2);
  six_bit(p + 4, out);
  for (int i = 0; i < 4; i++) nibbles(p + 16 + 32 * i, 32, out.q + 64 * i);
}

template <>
inline void expand<types::Q5_K>(const uint8_t* row, int64_t b, Block256& out) {
  const uint8_t* p = row + b * 176;
  out.d = load_f16(p);
  out.dmin = load_f16(p + 2);
  six_bit(p + 4, out);
  for (int i = 0; i < 4; i++) nibbles(p + 48 + 32 * i, 32, out.q + 64 * i);
  for (int i = 0; i < 256; i++) out.q[i] += (p[16 + i % 32] >> i / 32 & 1) * 16;
}

template <>
inline void expand<types::Q6_K>(const uint8_t* row, int64_t b, Block256& out) {
  const uint8_t* p = row + b * 210;
  out.d = load_f16(p + 208);
  for (int g = 0; g < 16; g++) out.scale[g] = static_cast<int8_t>(p[192 + g]);
  for (int half = 0; half < 2; half++) {
    int8_t high[128], *q = out.q + 128 * half;
    nibbles(p + 64 * half, 64, q);
    crumbs(p + 128 + 32 * half, high);
    for (int i = 0; i < 128; i++) q[i] += high[i] * 16 - 32;
  }
}

template <>
inline void expand<types::IQ4_XS>(const uint8_t* row, int64_t b, Block256& out) {
  const uint8_t* p = row + b * 136;
  out.d = load_f16(p);
  for (int g = 0; g < 8; g++) {
    const int low = p[4 + g / 2] >> g % 2 * 4 & 15, high = p[2 + g / 4] >> g % 4 * 2 & 3;
    set_pair(out.scale, g, (low | high << 4) - 32);
    nibbles(p + 8 + 16 * g, 16, out.q + 32 * g);
  }
  for (int8_t& q : out.q) q = IQ4_VALUES[q];
}

// `count` ternary digits of each of `width` bytes. A byte is a fraction of 256; digit i is floor(3 frac(byte 3^i / 256)).
template <class Byte>
inline Byte* ternary(const uint8_t* p, int width, int count, Byte* q) {
  int power = 1;
  for (int digit = 0; digit < count; digit++, power *= 3)
    for (int i = 0; i < width; i++) *q++ = (p[i] * power & 255) * 3 >> 8;
  return q;
}

// The 256 digits of a block.
template <class Byte>
inline void ternary_digits(const uint8_t* p, Byte* q) {
  q = ternary(p, 32, 5, q);
  q = ternary(p + 32, 16, 5, q);
  ternary(p + 48, 4, 4, q);
}

template <>
inline void expand<types::TQ1_0>(const uint8_t* row, int64_t b, Block256& out) {
  const uint8_t* p = row + b * 54;
  out.d = load_f16(p + 52);
  for (int16_t& scale : out.scale) scale = 1;
  ternary_digits(p, out.q);
  for (int8_t& q : out.q) q -= 1;
}

template <>
inline void expand<types::TQ2_0>(const uint8_t* row, int64_t b, Block256& out) {
  const uint8_t* p = row + b * 66;
  out.d = load_f16(p + 64);
  for (int16_t& scale : out.scale) scale = 1;
  crumbs(p, out.q);
  crumbs(p + 32, out.q + 128);
  for (int8_t& q : out.q) q -= 1;
}

template <>
inline void expand<types::IQ2_XXS>(const uint8_t* row, int64_t b, Block256& out) {
  const uint8_t* p = row + b * 66;
  out.d = load_f16(p) * 0.125f;
  for (int g = 0; g < 8; g++) {  // per 32 elements: four grid indices, four times 7 sign bits, 4 bits of scale
    const uint8_t* group = p + 2 + 8 * g;
    const uint32_t word = load_u32(group + 4);
    set_pair(out.scale, g, 2 * static_cast<int>(word >> 28) + 1);
    for (int i = 0; i < 4; i++) {
      int8_t* q = out.q + 32 * g + 8 * i;
      std::memcpy(q, IQ2_XXS_GRID[group[i]], 8);
      negate(q, even_signs(word >> 7 * i & 127));
    }
  }
}

template <>
inline void expand<types::IQ2_XS>(const uint8_t* row, int64_t b, Block256& out) {
  const uint8_t* p = row + b * 74;
  out.d = load_f16(p) * 0.125f;
  for (int g = 0; g < 16; g++) out.scale[g] = 2 * (p[66 + g / 2] >> g % 2 * 4 & 15) + 1;
  for (int i = 0; i < 32; i++) {
    const uint32_t word = load_u16(p + 2 + 2 * i);
    std::memcpy(out.q + 8 * i, IQ2_XS_GRID[word & 511], 8);
    negate(out.q + 8 * i, even_signs(word >> 9));
  }
}

template <>
inline void expand<types::IQ2_S>(const uint8_t* row, int64_t b, Block256& out) {
  const uint8_t* p = row + b * 82;
  out.d = load_f16(p) * 0.125f;
  for (int g = 0; g < 16; g++) out.scale[g] = 2 * (p[74 + g / 2] >> g % 2 * 4 & 15) + 1;
  for (int i = 0; i < 32; i++) {
    std::memcpy(out.q + 8 * i, IQ2_S_GRID[p[2 + i] | (p[66 + i / 4] >> i % 4 * 2 & 3) << 8], 8);
    negate(out.q + 8 * i, p[34 + i]);
  }
}

template <>
inline void expand<types::IQ3_XXS>(const uint8_t* row, int64_t b, Block256& out) {
  const uint8_t* p = row + b * 98;
  out.d = load_f16(p) * 0.25f;
  for (int i = 0; i < 64; i++) std::memcpy(out.q + 4 * i, IQ3_XXS_GRID[p[2 + i]], 4);
  for (int g = 0; g < 8; g++) {
    const uint32_t word = load_u32(p + 66 + 4 * g);
    set_pair(out.scale, g, 2 * static_cast<int>(word >> 28) + 1);
    for (int i = 0; i < 4; i++) negate(out.q + 32 * g + 8 * i, even_signs(word >> 7 * i & 127));
  }
}

template <>
inline void expand<types::IQ3_S>(const uint8_t* row, int64_t b, Block256& out) {
  const uint8_t* p = row + b * 110;
  out.d = load_f16(p);
  for (int g = 0; g < 8; g++) set_pair(out.scale, g, 2 * (p[106 + g / 2] >> g % 2 * 4 & 15) + 1);
  for (int i = 0; i < 64; i++) std::memcpy(out.q + 4 * i, IQ3_S_GRID[p[2 + i] | (p[66 + i / 8] >> i % 8 & 1) << 8], 4);
  for (int i = 0; i < 32; i++) negate(out.q + 8 * i, p[74 + i]);
}

// Elements are scale * (point +- 1/8), kept as eighths: q = 8 * point +- 1.
inline void iq1_points(uint32_t index, bool minus, int8_t* q) {
  for (int i = 0; i < 8; i++) q[i] = 8 * IQ1_S_GRID[index][i] + (minus ? -1 : 1);
}

template <>
inline void expand<types::IQ1_S>(const uint8_t* row, int64_t b, Block256& out) {
  const uint8_t* p = row + b * 50;
  out.d = load_f16(p) * 0.125f;
  for (int g = 0; g < 8; g++) {
    const uint32_t word = load_u16(p + 34 + 2 * g);
    set_pair(out.scale, g, 2 * static_cast<int>(word >> 12 & 7) + 1);
    for (int i = 0; i < 4; i++)
      iq1_points(p[2 + 4 * g + i] | (word >> 3 * i & 7) << 8, word >> 15, out.q + 32 * g + 8 * i);
  }
}

template <>
inline void expand<types::IQ1_M>(const uint8_t* row, int64_t b, Block256& out) {
  const uint8_t *p = row + b * 56, *words = p + 48;
  uint16_t d = 0;  // spread over the top nibbles of the scale words
  for (int i = 0; i < 4; i++) d |= load_u16(words + 2 * i) >> 12 << 4 * i;
  out.d = f16_to_f32(d) * 0.125f;
  for (int g = 0; g < 16; g++) out.scale[g] = 2 * (load_u16(words + g / 4 * 2) >> g % 4 * 3 & 7) + 1;
  for (int i = 0; i < 32; i++) {
    const uint32_t high = p[32 + i / 2] >> i % 2 * 4 & 15;
    iq1_points(p[i] | (high & 7) << 8, high & 8, out.q + 8 * i);
  }
}

// ---- floats ---------------------------------------------------------------------------------------------------------

// K elements of a packed type; K is a multiple of the type's block.
template <int qtype>
void dequantize_packed(const uint8_t* row, int64_t K, float* y) {
  if constexpr (type_info(qtype).lattice == types::Q8_K) {
    for (int64_t b = 0; b < K / 256; b++, y += 256) {
      Block256 block;
      expand<qtype>(row, b, block);
      for (int g = 0; g < 16; g++) {
        const float d = block.d * static_cast<float>(block.scale[g]);
        const float min = has_min(qtype) ? block.dmin * static_cast<float>(block.min[g]) : 0;
        for (int i = 0; i < 16; i++) {
          const float v = d * static_cast<float>(block.q[16 * g + i]);
          y[16 * g + i] = has_min(qtype) ? v - min : v;
        }
      }
    }
  } else {
    for (int64_t b = 0; b < K / 32; b++, y += 32) {
      Block32 block;
      expand<qtype>(row, b, block);
      for (int i = 0; i < 32; i++) {
        y[i] = block.d[i / 16] * static_cast<float>(block.q[i]);
        if (type_info(qtype).lattice == types::Q8_1) y[i] += block.m;
      }
    }
  }
}

// K elements of a weight type (K a multiple of its block) -> y. qtype must be a weight type.
inline void dequantize_row(int qtype, const uint8_t* row, int64_t K, float* y) {
  switch (qtype) {
    case types::F32:
      std::memcpy(y, row, 4 * static_cast<size_t>(K));
      break;
    case types::F16:
      for (int64_t i = 0; i < K; i++) y[i] = load_f16(row + 2 * i);
      break;
    case types::BF16:
      for (int64_t i = 0; i < K; i++) y[i] = bf16_to_f32(load_u16(row + 2 * i));
      break;
#define DASLLAMA_CASE(name)                              \
  case types::name:                                      \
    dequantize_packed<types::name>(row, K, y);           \
    break;
      DASLLAMA_PACKED_TYPES(DASLLAMA_CASE)
#undef DASLLAMA_CASE
  }
}

}  // namespace
}  // namespace dasllama
