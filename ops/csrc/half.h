// f16 and bf16 to f32 and back, in integers: exact, round to nearest even, the same bits on every instruction set.
#pragma once
#include <cstdint>
#include <cstring>

namespace dasllama {
namespace {

inline float as_float(uint32_t bits) {
  float f;
  std::memcpy(&f, &bits, sizeof f);
  return f;
}

inline uint32_t as_bits(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, sizeof bits);
  return bits;
}

inline float f16_to_f32(uint16_t h) {
  const uint32_t sign = (h & 0x8000u) << 16, exponent = h >> 10 & 31, mantissa = h & 1023;
  if (exponent == 0) return as_float(as_bits(static_cast<float>(mantissa) * 0x1p-24f) | sign);
  return as_float(sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13);
}

inline uint16_t f32_to_f16(float f) {
  const uint32_t bits = as_bits(f), a = bits & 0x7fffffff;
  const uint16_t sign = bits >> 16 & 0x8000;
  if (a > 0x7f800000) return sign | 0x7e00;   // NaN
  if (a >= 0x477ff000) return sign | 0x7c00;  // 65520 and above round to infinity
  if (a < 0x38800000)                         // below 2^-14: the sum with 1/2 rounds to a multiple of 2^-24
    return sign | (as_bits(as_float(a) + 0.5f) - 0x3f000000);
  return sign | ((a - 0x38000000 + 0xfff + (a >> 13 & 1)) >> 13);
}

inline float bf16_to_f32(uint16_t h) { return as_float(static_cast<uint32_t>(h) << 16); }

inline uint16_t f32_to_bf16(float f) {
  const uint32_t bits = as_bits(f);
  if ((bits & 0x7fffffff) > 0x7f800000) return (bits >> 16) | 64;  // NaN stays NaN
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// Little-endian words at any address.
inline uint16_t load_u16(const uint8_t* p) { return p[0] | p[1] << 8; }
inline uint32_t load_u32(const uint8_t* p) { return load_u16(p) | static_cast<uint32_t>(load_u16(p + 2)) << 16; }
inline void store_u16(uint8_t* p, uint16_t v) {
  p[0] = static_cast<uint8_t>(v);
  p[1] = static_cast<uint8_t>(v >> 8);
}
inline float load_f16(const uint8_t* p) { return f16_to_f32(load_u16(p)); }

}  // namespace
}  // namespace dasllama
