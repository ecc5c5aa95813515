// The vectors of the integer matmul in AVX-512 (F, BW, VL, DQ, VNNI). simd_avx2.h offers the same names.
//
// A vector is kUnits = 4 units of 16 bytes, or kLanes = 16 lanes of 32 bits. Sixteen weight rows make a strip, and a lane
// stands for a row. Products are unsigned weight times signed activation; signed weights are made unsigned by flipping
// their sign bit (kFlip, an offset of 128, which the caller takes back through the sums of the activation).
#pragma once
#include <immintrin.h>

#include <cstdint>

#include "lanes.h"

namespace dasllama {
namespace {
namespace int_dot {

typedef __m128i Unit;
typedef __m512i Ints;
typedef __m512 Floats;
constexpr int kUnits = 4, kLanes = 16;
constexpr int kTileRows = 6, kTileStrips = 2;  // the register tile: rows of x by strips of w
constexpr int kFlip = 0x80;

DASLLAMA_INLINE Ints zero_ints() { return _mm512_setzero_si512(); }
DASLLAMA_INLINE Ints splat_ints(int32_t v) { return _mm512_set1_epi32(v); }
DASLLAMA_INLINE Ints splat_bytes(int v) { return _mm512_set1_epi8(static_cast<char>(v)); }
DASLLAMA_INLINE Ints load_ints(const void* p) { return _mm512_loadu_si512(p); }
DASLLAMA_INLINE void store_ints(void* p, Ints v) { _mm512_storeu_si512(p, v); }
DASLLAMA_INLINE Floats zero_floats() { return _mm512_setzero_ps(); }
DASLLAMA_INLINE Floats splat_floats(float f) { return _mm512_set1_ps(f); }
DASLLAMA_INLINE Floats load_floats(const float* p) { return _mm512_loadu_ps(p); }
DASLLAMA_INLINE void store_floats(float* p, Floats v) { _mm512_storeu_ps(p, v); }

DASLLAMA_INLINE Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
DASLLAMA_INLINE Ints add_bytes(Ints a, Ints b) { return _mm512_add_epi8(a, b); }
DASLLAMA_INLINE Ints mul(Ints a, Ints b) { return _mm512_mullo_epi32(a, b); }
DASLLAMA_INLINE Ints mul_pairs(Ints a, Ints b) { return _mm512_madd_epi16(a, b); }
DASLLAMA_INLINE Ints bit_and(Ints a, Ints b) { return _mm512_and_si512(a, b); }
DASLLAMA_INLINE Ints bit_or(Ints a, Ints b) { return _mm512_or_si512(a, b); }
DASLLAMA_INLINE Ints bit_xor(Ints a, Ints b) { return _mm512_xor_si512(a, b); }
DASLLAMA_INLINE Ints shift_left(Ints a, int n) { return _mm512_slli_epi32(a, n); }
DASLLAMA_INLINE Ints shift_right(Ints a, int n) { return _mm512_srli_epi32(a, n); }
DASLLAMA_INLINE Ints shift_right_signed(Ints a, int n) { return _mm512_srai_epi32(a, n); }
DASLLAMA_INLINE Floats to_floats(Ints a) { return _mm512_cvtepi32_ps(a); }
DASLLAMA_INLINE Floats as_floats(Ints a) { return _mm512_castsi512_ps(a); }
DASLLAMA_INLINE Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
DASLLAMA_INLINE Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
DASLLAMA_INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
DASLLAMA_INLINE Floats fnma(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a * b
DASLLAMA_INLINE Ints select_less(Ints a, int than, Ints yes, Ints no) {
  return _mm512_mask_mov_epi32(no, _mm512_cmplt_epi32_mask(a, _mm512_set1_epi32(than)), yes);
}

// The f16 in the low (high) half of each lane.
DASLLAMA_INLINE Floats low_half(Ints a) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(a)); }
DASLLAMA_INLINE Floats high_half(Ints a) { return low_half(shift_right(a, 16)); }

// Units at p, p + step, ...; with `last` no unit beyond that one is read, it is repeated instead.
DASLLAMA_INLINE __m128i load_unit(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
DASLLAMA_INLINE Ints join_units(const Unit (&unit)[4]) {
  const __m512i two = _mm512_inserti32x4(_mm512_castsi128_si512(unit[0]), unit[1], 1);
  return _mm512_inserti32x4(_mm512_inserti32x4(two, unit[2], 2), unit[3], 3);
}
DASLLAMA_INLINE Ints load_units(const uint8_t* p, int64_t step) {
  return join_units({load_unit(p), load_unit(p + step), load_unit(p + 2 * step), load_unit(p + 3 * step)});
}
DASLLAMA_INLINE Ints load_units(const uint8_t* p, int64_t step, int last) {
  return join_units({load_unit(p), load_unit(p + (last < 1 ? last : 1) * step),
                     load_unit(p + (last < 2 ? last : 2) * step), load_unit(p + last * step)});
}
DASLLAMA_INLINE Ints repeat_unit(__m128i unit) { return _mm512_broadcast_i32x4(unit); }
// Halves of units, from p on: each fills a unit, twice.
DASLLAMA_INLINE Ints load_halves_twice(const uint8_t* p) {
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_permutexvar_epi64(_mm512_set_epi64(3, 3, 2, 2, 1, 1, 0, 0), _mm512_castsi256_si512(halves));
}
// Four rows of units -> v[i] holds, in each unit, the four rows' i-th 32 bits.
DASLLAMA_INLINE void transpose_quad(Ints* v) {
  const Ints a = _mm512_unpacklo_epi32(v[0], v[1]), b = _mm512_unpacklo_epi32(v[2], v[3]);
  const Ints c = _mm512_unpackhi_epi32(v[0], v[1]), d = _mm512_unpackhi_epi32(v[2], v[3]);
  v[0] = _mm512_unpacklo_epi64(a, b);
  v[1] = _mm512_unpackhi_epi64(a, b);
  v[2] = _mm512_unpacklo_epi64(c, d);
  v[3] = _mm512_unpackhi_epi64(c, d);
}
// The even 32 bits of each unit of a, then of b, to v[0]; the odd ones to v[1].
DASLLAMA_INLINE void deal_lanes(Ints a, Ints b, Ints* v) {
  const __m512 first = _mm512_castsi512_ps(a), second = _mm512_castsi512_ps(b);
  v[0] = _mm512_castps_si512(_mm512_shuffle_ps(first, second, 0x88));
  v[1] = _mm512_castps_si512(_mm512_shuffle_ps(first, second, 0xdd));
}
// kLanes bytes, a lane each.
DASLLAMA_INLINE Ints widen_bytes(const uint8_t* p, bool is_signed) {
  return is_signed ? _mm512_cvtepi8_epi32(load_unit(p)) : _mm512_cvtepu8_epi32(load_unit(p));
}
DASLLAMA_INLINE float f16_at(const uint8_t* p) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(load_u16(p)))); }

DASLLAMA_INLINE Ints low_nibbles(Ints v) { return bit_and(v, splat_bytes(15)); }
DASLLAMA_INLINE Ints high_nibbles(Ints v) { return bit_and(_mm512_srli_epi16(v, 4), splat_bytes(15)); }
// table: one unit, repeated.
DASLLAMA_INLINE Ints lookup(Ints table, Ints index) { return _mm512_shuffle_epi8(table, index); }
// v shifted right by `first` bits in unit 0, by `step` more in each next unit; bits cross bytes within 32.
DASLLAMA_INLINE Ints shift_units(Ints v, int first, int step) {
  const int a = first, b = a + step, c = b + step, d = c + step;
  return _mm512_srlv_epi32(v, _mm512_set_epi32(d, d, d, d, c, c, c, c, b, b, b, b, a, a, a, a));
}
// Two units, twice.
DASLLAMA_INLINE Ints load_unit_pair(const uint8_t* p) {
  return _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
// v shifted right by `first` bits in units 0 and 1, by `step` more in the next two.
DASLLAMA_INLINE Ints shift_unit_pairs(Ints v, int first, int step) {
  const int a = first, b = a + step;
  return _mm512_srlv_epi32(v, _mm512_set_epi32(b, b, b, b, b, b, b, b, a, a, a, a, a, a, a, a));
}
// v plus 16 in the bytes j of each unit for which bit j of that unit's bytes `at` and `at + 1` in bits is set.
DASLLAMA_INLINE Ints add_fifth_bits(Ints v, Ints bits, int at) {
  const char a = static_cast<char>(at), b = static_cast<char>(at + 1);
  const Ints spread = _mm512_shuffle_epi8(bits, repeat_unit(_mm_setr_epi8(a, a, a, a, a, a, a, a, b, b, b, b, b, b, b, b)));
  const __mmask64 set = _mm512_test_epi8_mask(spread, _mm512_set1_epi64(static_cast<int64_t>(0x8040201008040201)));
  return _mm512_mask_add_epi8(v, set, v, splat_bytes(16));
}
// A vector of points of a grid.
DASLLAMA_INLINE Ints points(const int8_t (*grid)[8], const uint16_t* index) {
  const auto two = [&](int i) __attribute__((always_inline)) {
    uint32_t both;
    std::memcpy(&both, index + 2 * i, 4);
    const __m128i low = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(grid[both & 0xffff]));
    return _mm_castps_si128(_mm_loadh_pi(_mm_castsi128_ps(low), reinterpret_cast<const __m64*>(grid[both >> 16])));
  };
  return join_units({two(0), two(1), two(2), two(3)});
}
// a + b, but a - b in the bytes whose bit is set: bit j % 8 of bits[j / 8] for byte j.
DASLLAMA_INLINE Ints plus_minus(Ints a, Ints b, const uint8_t* bits) {
  __mmask64 minus;
  std::memcpy(&minus, bits, 8);
  return _mm512_mask_sub_epi8(_mm512_add_epi8(a, b), minus, a, b);
}

// Products of 16-element units (one, or two that belong to one group), four sums of 32 bits per unit.
template <int kMax>
DASLLAMA_INLINE Ints dot(Ints w, Ints a) {
  return _mm512_dpbusd_epi32(zero_ints(), w, a);
}
template <int kMax>
DASLLAMA_INLINE Ints dot(Ints w0, Ints a0, Ints w1, Ints a1) {
  return _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(zero_ints(), w0, a0), w1, a1);
}

// Adds to sum the products of units, one or two of a group, times their groups' scales, which fill the units' words.
template <int kMax>
DASLLAMA_INLINE Ints add_scaled(Ints sum, Ints dots, Ints scale) {
  return add(sum, mul(dots, _mm512_srai_epi32(scale, 16)));
}
template <int kMax>
DASLLAMA_INLINE Ints add_scaled_dots(Ints sum, Ints w, Ints a, Ints scale) {
  if constexpr (kMax > 127) return add_scaled<kMax>(sum, dot<kMax>(w, a), scale);
  return _mm512_dpwssd_epi32(sum, _mm512_maddubs_epi16(w, a), scale);
}
template <int kMax>
DASLLAMA_INLINE Ints add_scaled_dots(Ints sum, Ints w0, Ints a0, Ints w1, Ints a1, Ints scale) {
  if constexpr (kMax > 127) return add_scaled<kMax>(sum, dot<kMax>(w0, a0, w1, a1), scale);
  const Ints first = _mm512_maddubs_epi16(w0, a0), second = _mm512_maddubs_epi16(w1, a1);
  if constexpr (kMax > 63) return _mm512_dpwssd_epi32(_mm512_dpwssd_epi32(sum, first, scale), second, scale);
  return _mm512_dpwssd_epi32(sum, _mm512_add_epi16(first, second), scale);
}
// Words that fill the units: for unit i, word group(i) of 16.
template <class Group>
DASLLAMA_INLINE Ints words_of(__m256i words, const Group& group) {
  const auto four = [&](int i) { return group(i) * 0x0001000100010001; };
  const Ints index = _mm512_set_epi64(four(3), four(3), four(2), four(2), four(1), four(1), four(0), four(0));
  return _mm512_permutexvar_epi16(index, _mm512_castsi256_si512(words));
}
// All units added up.
DASLLAMA_INLINE Unit sum_units(__m256i v) {
  return _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
}
DASLLAMA_INLINE Unit sum_units(Ints v) {
  return sum_units(_mm256_add_epi32(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1)));
}

// Four rows' dots of kParts units -> in each unit, the four rows' sums over it.
template <int kMax, int kParts>
DASLLAMA_INLINE Ints sum_quad(Ints a, Ints b, Ints c, Ints d) {
  const Ints ab = add(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  const Ints cd = add(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
  return add(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
}
// Unit i of v[j] changes places with unit j of v[i].
DASLLAMA_INLINE void transpose_units(Ints* v) {
  const Ints a = _mm512_shuffle_i32x4(v[0], v[1], 0x44), b = _mm512_shuffle_i32x4(v[2], v[3], 0x44);
  const Ints c = _mm512_shuffle_i32x4(v[0], v[1], 0xee), d = _mm512_shuffle_i32x4(v[2], v[3], 0xee);
  v[0] = _mm512_shuffle_i32x4(a, b, 0x88);
  v[1] = _mm512_shuffle_i32x4(a, b, 0xdd);
  v[2] = _mm512_shuffle_i32x4(c, d, 0x88);
  v[3] = _mm512_shuffle_i32x4(c, d, 0xdd);
}

// Units at p, p + 32, ... to w[0], those between them to w[1].
DASLLAMA_INLINE void load_dealt_units(const uint8_t* p, Ints* w) {
  const Ints a = load_ints(p), b = load_ints(p + 64);
  w[0] = _mm512_shuffle_i32x4(a, b, 0x88);
  w[1] = _mm512_shuffle_i32x4(a, b, 0xdd);
}
// The units of a and b, one after the other: even ones to w[0], odd ones to w[1].
DASLLAMA_INLINE void deal_units(Ints a, Ints b, Ints* w) {
  w[0] = _mm512_shuffle_i32x4(a, b, 0x88);
  w[1] = _mm512_shuffle_i32x4(a, b, 0xdd);
}

// Sums of kGroup products for MR rows of x by NR strips: panel[n] holds kGroup / 4 vectors of 4 weights per lane.
template <int kMax, int kGroup, int MR, int NR>
DASLLAMA_INLINE void tile_dots(const uint8_t* const* panel, const int8_t* const* x, Ints (&sum)[MR][NR]) {
#pragma GCC unroll 8
  for (int k = 0; k < kGroup; k += 4) {
    Ints w[NR];
#pragma GCC unroll 4
    for (int n = 0; n < NR; n++) w[n] = load_ints(panel[n] + k * kLanes);
#pragma GCC unroll 8
    for (int m = 0; m < MR; m++) {
      int32_t four;
      std::memcpy(&four, x[m] + k, 4);
      const Ints a = splat_ints(four);
#pragma GCC unroll 4
      for (int n = 0; n < NR; n++) sum[m][n] = _mm512_dpbusd_epi32(sum[m][n], w[n], a);
    }
  }
}

}  // namespace int_dot
}  // namespace
}  // namespace dasllama
