// The vectors of the integer matmul in AVX2, FMA and F16C. simd_avx512.h and simd_neon.h offer the same names, with
// wide_sums.h.
//
// A vector is kUnits = 2 units of 16 bytes, or kLanes = 8 lanes of 32 bits. Eight weight rows make a strip, and a lane
// stands for a row. vpmaddubsw adds two products of an unsigned and a signed byte in 16 bits. Unsigned weights (kMax up
// to 127) take the activation as it is; signed ones (kMax 128) give their sign to it, as 2 * 128 * 127 still fits, and in
// a tile come as two nibbles. kMax decides how many of these 16-bit sums may be added before they are widened (dot,
// sum_quad, tile_pairs), so that nothing ever saturates.
#pragma once
#include <immintrin.h>

#include <cstdint>

#include "lanes.h"

namespace dasllama {
namespace {
namespace int_dot {

typedef __m128i Unit;
typedef __m256i Ints;
typedef __m256 Floats;
constexpr int kUnits = 2, kLanes = 8;
constexpr int kTileRows = 4, kTileStrips = 1;  // the register tile: rows of x by strips of w
constexpr int kFlip = 0;                       // signed weights stay signed

DASLLAMA_INLINE Ints zero_ints() { return _mm256_setzero_si256(); }
DASLLAMA_INLINE Ints splat_ints(int32_t v) { return _mm256_set1_epi32(v); }
DASLLAMA_INLINE Ints splat_bytes(int v) { return _mm256_set1_epi8(static_cast<char>(v)); }
DASLLAMA_INLINE Ints load_ints(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
DASLLAMA_INLINE void store_ints(void* p, Ints v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }
DASLLAMA_INLINE Floats zero_floats() { return _mm256_setzero_ps(); }
DASLLAMA_INLINE Floats splat_floats(float f) { return _mm256_set1_ps(f); }
DASLLAMA_INLINE Floats load_floats(const float* p) { return _mm256_loadu_ps(p); }
DASLLAMA_INLINE void store_floats(float* p, Floats v) { _mm256_storeu_ps(p, v); }

DASLLAMA_INLINE Ints add(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
DASLLAMA_INLINE Ints add_bytes(Ints a, Ints b) { return _mm256_add_epi8(a, b); }
DASLLAMA_INLINE Ints mul(Ints a, Ints b) { return _mm256_mullo_epi32(a, b); }
DASLLAMA_INLINE Ints mul_pairs(Ints a, Ints b) { return _mm256_madd_epi16(a, b); }
DASLLAMA_INLINE Ints bit_and(Ints a, Ints b) { return _mm256_and_si256(a, b); }
DASLLAMA_INLINE Ints bit_or(Ints a, Ints b) { return _mm256_or_si256(a, b); }
DASLLAMA_INLINE Ints bit_xor(Ints a, Ints b) { return _mm256_xor_si256(a, b); }
DASLLAMA_INLINE Ints shift_left(Ints a, int n) { return _mm256_slli_epi32(a, n); }
DASLLAMA_INLINE Ints shift_right(Ints a, int n) { return _mm256_srli_epi32(a, n); }
DASLLAMA_INLINE Ints shift_right_signed(Ints a, int n) { return _mm256_srai_epi32(a, n); }
DASLLAMA_INLINE Floats to_floats(Ints a) { return _mm256_cvtepi32_ps(a); }
DASLLAMA_INLINE Floats as_floats(Ints a) { return _mm256_castsi256_ps(a); }
DASLLAMA_INLINE Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
DASLLAMA_INLINE Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
DASLLAMA_INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
DASLLAMA_INLINE Floats fnma(Floats a, Floats b, Floats c) { return _mm256_fnmadd_ps(a, b, c); }  // c - a * b
DASLLAMA_INLINE Ints select_less(Ints a, int than, Ints yes, Ints no) {
  return _mm256_blendv_epi8(no, yes, _mm256_cmpgt_epi32(_mm256_set1_epi32(than), a));
}

// The f16 in the low (high) half of each lane.
DASLLAMA_INLINE Floats high_half(Ints a) {
  const Ints high = _mm256_srli_epi32(a, 16);
  const Ints packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x88);
  return _mm256_cvtph_ps(_mm256_castsi256_si128(packed));
}
DASLLAMA_INLINE Floats low_half(Ints a) { return high_half(shift_left(a, 16)); }

// Units at p, p + step, ...; with `last` no unit beyond that one is read, it is repeated instead.
DASLLAMA_INLINE __m128i load_unit(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
DASLLAMA_INLINE Ints join_units(const Unit (&unit)[2]) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(unit[0]), unit[1], 1);
}
DASLLAMA_INLINE Ints load_units(const uint8_t* p, int64_t step) { return join_units({load_unit(p), load_unit(p + step)}); }
DASLLAMA_INLINE Ints load_units(const uint8_t* p, int64_t step, int last) {
  return load_units(p, (last < 1 ? last : 1) * step);
}
DASLLAMA_INLINE Ints repeat_unit(__m128i unit) { return _mm256_broadcastsi128_si256(unit); }
// Halves of units, from p on: each fills a unit, twice.
DASLLAMA_INLINE Ints load_halves_twice(const uint8_t* p) {
  return _mm256_permute4x64_epi64(_mm256_castsi128_si256(load_unit(p)), 0x50);
}
// Four rows of units -> v[i] holds, in each unit, the four rows' i-th 32 bits.
DASLLAMA_INLINE void transpose_quad(Ints* v) {
  const Ints a = _mm256_unpacklo_epi32(v[0], v[1]), b = _mm256_unpacklo_epi32(v[2], v[3]);
  const Ints c = _mm256_unpackhi_epi32(v[0], v[1]), d = _mm256_unpackhi_epi32(v[2], v[3]);
  v[0] = _mm256_unpacklo_epi64(a, b);
  v[1] = _mm256_unpackhi_epi64(a, b);
  v[2] = _mm256_unpacklo_epi64(c, d);
  v[3] = _mm256_unpackhi_epi64(c, d);
}
// The even 32 bits of each unit of a, then of b, to v[0]; the odd ones to v[1].
DASLLAMA_INLINE void deal_lanes(Ints a, Ints b, Ints* v) {
  const __m256 first = _mm256_castsi256_ps(a), second = _mm256_castsi256_ps(b);
  v[0] = _mm256_castps_si256(_mm256_shuffle_ps(first, second, 0x88));
  v[1] = _mm256_castps_si256(_mm256_shuffle_ps(first, second, 0xdd));
}
// kLanes bytes, a lane each.
DASLLAMA_INLINE Ints widen_bytes(const uint8_t* p, bool is_signed) {
  const __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return is_signed ? _mm256_cvtepi8_epi32(eight) : _mm256_cvtepu8_epi32(eight);
}
DASLLAMA_INLINE float f16_at(const uint8_t* p) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(load_u16(p)))); }

DASLLAMA_INLINE Ints low_nibbles(Ints v) { return bit_and(v, splat_bytes(15)); }
DASLLAMA_INLINE Ints high_nibbles(Ints v) { return bit_and(_mm256_srli_epi16(v, 4), splat_bytes(15)); }
// table: one unit, repeated.
DASLLAMA_INLINE Ints lookup(Ints table, Ints index) { return _mm256_shuffle_epi8(table, index); }
// v shifted right by `first` bits in unit 0, by `step` more in each next unit; bits cross bytes within 32.
DASLLAMA_INLINE Ints shift_units(Ints v, int first, int step) {
  const int a = first, b = a + step;
  return _mm256_srlv_epi32(v, _mm256_set_epi32(b, b, b, b, a, a, a, a));
}
// Two units.
DASLLAMA_INLINE Ints load_unit_pair(const uint8_t* p) { return load_ints(p); }
// v shifted right by `first` bits in units 0 and 1 (by `step` more in the next two, which only AVX-512 has).
DASLLAMA_INLINE Ints shift_unit_pairs(Ints v, int first, int) { return shift_right(v, first); }
// v plus 16 in the bytes j of each unit for which bit j of that unit's bytes `at` and `at + 1` in bits is set.
DASLLAMA_INLINE Ints add_fifth_bits(Ints v, Ints bits, int at) {
  const char a = static_cast<char>(at), b = static_cast<char>(at + 1);
  const Ints one = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
  const Ints spread = _mm256_shuffle_epi8(bits, repeat_unit(_mm_setr_epi8(a, a, a, a, a, a, a, a, b, b, b, b, b, b, b, b)));
  const Ints set = _mm256_cmpeq_epi8(bit_and(spread, one), one);
  return bit_or(v, bit_and(set, splat_bytes(16)));
}
// A vector of points of a grid.
DASLLAMA_INLINE Ints points(const int8_t (*grid)[8], const uint16_t* index) {
  uint64_t four;
  std::memcpy(&four, index, 8);  // taken apart in general registers: shuffles are what there is least room for
  const auto point = [&](int i) __attribute__((always_inline)) {
    int64_t eight;
    std::memcpy(&eight, grid[four >> 16 * i & 0xffff], 8);
    return _mm256_set1_epi64x(eight);
  };
  const Ints low = _mm256_blend_epi32(point(0), point(1), 0x0c), high = _mm256_blend_epi32(point(2), point(3), 0xc0);
  return _mm256_blend_epi32(low, high, 0xf0);
}
// a + b, but a - b in the bytes whose bit is set: bit j % 8 of bits[j / 8] for byte j.
DASLLAMA_INLINE Ints plus_minus(Ints a, Ints b, const uint8_t* bits) {
  int32_t four;
  std::memcpy(&four, bits, 4);
  const Ints one = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
  const Ints spread = _mm256_shuffle_epi8(splat_ints(four), _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202,
                                                                               0x0303030303030303));
  const Ints minus = _mm256_cmpeq_epi8(bit_and(spread, one), one);
  return _mm256_add_epi8(_mm256_sub_epi8(a, minus), bit_xor(b, minus));  // -b is ~b + 1
}

DASLLAMA_INLINE Ints widen(Ints pairs) { return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)); }
template <int kMax>
DASLLAMA_INLINE Ints byte_pairs(Ints w, Ints a) {
  if constexpr (kMax > 127) return _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(a, w));
  return _mm256_maddubs_epi16(w, a);
}

// Products of 16-element units (one, or two that belong to one group), added up in 16 bits where two units' fit into them.
template <int kMax>
DASLLAMA_INLINE Ints dot(Ints w, Ints a) {
  return byte_pairs<kMax>(w, a);
}
template <int kMax>
DASLLAMA_INLINE Ints dot(Ints w0, Ints a0, Ints w1, Ints a1) {
  const Ints first = byte_pairs<kMax>(w0, a0), second = byte_pairs<kMax>(w1, a1);
  if constexpr (kMax > 63) return add(widen(first), widen(second));
  return _mm256_add_epi16(first, second);
}

// Adds to sum the products of units, one or two of a group, times their groups' scales, which fill the units' words.
template <int kMax>
DASLLAMA_INLINE Ints add_scaled_dots(Ints sum, Ints w, Ints a, Ints scale) {
  return add(sum, mul_pairs(byte_pairs<kMax>(w, a), scale));
}
template <int kMax>
DASLLAMA_INLINE Ints add_scaled_dots(Ints sum, Ints w0, Ints a0, Ints w1, Ints a1, Ints scale) {
  const Ints first = byte_pairs<kMax>(w0, a0), second = byte_pairs<kMax>(w1, a1);
  if constexpr (kMax > 63) return add(add(sum, mul_pairs(first, scale)), mul_pairs(second, scale));
  return add(sum, mul_pairs(_mm256_add_epi16(first, second), scale));
}
// Words that fill the units: for unit i, word group(i) of 16. Both lie in the same half of them.
template <class Group>
DASLLAMA_INLINE Ints words_of(__m256i words, const Group& group) {
  const auto four = [&](int i) { return group(i) % 8 * 0x0202020202020202 + 0x0100010001000100; };
  const Ints index = _mm256_set_epi64x(four(1), four(1), four(0), four(0));
  return _mm256_shuffle_epi8(group(0) < 8 ? _mm256_permute2x128_si256(words, words, 0x00)
                                          : _mm256_permute2x128_si256(words, words, 0x11), index);
}
// All units added up.
DASLLAMA_INLINE Unit sum_units(Ints v) {
  return _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
}

// Four rows' dots of kParts units -> in each unit, the four rows' sums over it. Widened as late as 16 bits allow.
template <int kMax, int kParts>
DASLLAMA_INLINE Ints sum_quad(Ints a, Ints b, Ints c, Ints d) {
  constexpr int kMost = kParts * 2 * 127 * kMax, kFits = kParts == 2 && kMax > 63 ? 0 : 32767 / kMost;
  if constexpr (kFits == 1) a = widen(a), b = widen(b), c = widen(c), d = widen(d);
  const auto plus = [](bool narrow, Ints a, Ints b) __attribute__((always_inline)) {
    return narrow ? _mm256_add_epi16(a, b) : add(a, b);
  };
  const Ints ab = plus(kFits >= 2, _mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
  const Ints cd = plus(kFits >= 2, _mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
  const Ints low = _mm256_unpacklo_epi64(ab, cd), high = _mm256_unpackhi_epi64(ab, cd);
  if constexpr (kFits >= 4) return widen(_mm256_add_epi16(low, high));
  return kFits >= 2 ? add(widen(low), widen(high)) : add(low, high);
}
// Unit i of v[j] changes places with unit j of v[i].
DASLLAMA_INLINE void transpose_units(Ints* v) {
  const Ints a = v[0], b = v[1];
  v[0] = _mm256_permute2x128_si256(a, b, 0x20);
  v[1] = _mm256_permute2x128_si256(a, b, 0x31);
}

// Units at p, p + 32, ... to w[0], those between them to w[1].
DASLLAMA_INLINE void load_dealt_units(const uint8_t* p, Ints* w) {
  w[0] = load_units(p, 32);
  w[1] = load_units(p + 16, 32);
}
// The units of a and b, one after the other: even ones to w[0], odd ones to w[1].
DASLLAMA_INLINE void deal_units(Ints a, Ints b, Ints* w) {
  w[0] = _mm256_permute2x128_si256(a, b, 0x20);
  w[1] = _mm256_permute2x128_si256(a, b, 0x31);
}

// What the largest weight means for a tile: weights whose sums may be widened equally late share one.
constexpr int tile_max(int max) { return max > 127 ? 128 : max > 63 ? 127 : max > 31 ? 63 : max > 15 ? 31 : 15; }
// Signed weights lie in a panel as the two nibbles of weight + 128, whose products add up in 16 bits for a whole group:
// less work than an instruction for the sign of every product.
constexpr int tile_planes(int max) { return max > 127 ? 2 : 1; }
constexpr int tile_bias(int max, int bias) { return max > 127 ? 128 : bias; }

// Four weights of each lane to their place in a panel.
template <int kMax>
DASLLAMA_INLINE void store_weights(uint8_t* p, Ints w) {
  if constexpr (tile_planes(kMax) == 2) {
    w = bit_xor(w, splat_bytes(0x80));
    store_ints(p + sizeof(Ints), high_nibbles(w));
    w = low_nibbles(w);
  }
  store_ints(p, w);
}

// The end of a sum whose order the compiler must keep: GCC makes a tree of it, with all products before it, and runs out
// of registers.
DASLLAMA_INLINE Ints in_order(Ints v) {
  __asm__("" : "+x"(v));
  return v;
}

// The products of kGroup elements of MR rows of x and NR strips, added up in 16 bits: take(m, n, plane, pairs), as often
// as they have to be widened.
template <int kMax, int kGroup, int MR, int NR, class Take>
DASLLAMA_INLINE void tile_pairs(const uint8_t* const* panel, const int8_t* const* x, const Take& take) {
  constexpr int kPlanes = tile_planes(kMax), kVectors = NR * kPlanes;
  constexpr int kFit = 32767 / (2 * 127 * (kPlanes == 2 ? 15 : kMax));
  constexpr int kSteps = kFit >= 8 ? 8 : kFit >= 4 ? 4 : kFit >= 2 ? 2 : 1;
  constexpr int kStride = kSteps * 4 < kGroup ? kSteps * 4 : kGroup;
#pragma GCC unroll 8
  for (int begin = 0; begin < kGroup; begin += kStride) {
    Ints pairs[MR][kVectors];
#pragma GCC unroll 8
    for (int k = begin; k < begin + kStride; k += 4) {
      Ints w[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v++) w[v] = load_ints(panel[v / kPlanes] + (k * kPlanes + v % kPlanes * 4) * kLanes);
#pragma GCC unroll 8
      for (int m = 0; m < MR; m++) {
        int32_t four;
        std::memcpy(&four, x[m] + k, 4);
        const Ints a = splat_ints(four);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v++) {
          const Ints products = _mm256_maddubs_epi16(w[v], a);
          pairs[m][v] = k == begin ? products : _mm256_add_epi16(pairs[m][v], products);
          pairs[m][v] = in_order(pairs[m][v]);
        }
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < MR; m++)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v++) take(m, v / kPlanes, v % kPlanes, pairs[m][v]);
  }
}

// Adds to sum the products of kGroup elements.
template <int kMax, int kGroup, int MR, int NR>
DASLLAMA_INLINE void tile_dots(const uint8_t* const* panel, const int8_t* const* x, Ints (&sum)[MR][NR]) {
  tile_pairs<kMax, kGroup, MR, NR>(panel, x, [&](int m, int n, int plane, Ints pairs) __attribute__((always_inline)) {
    sum[m][n] = in_order(add(sum[m][n], _mm256_madd_epi16(pairs, _mm256_set1_epi16(plane ? 16 : 1))));
  });
}

// A group's scale as a tile wants it: twice in 16 bits, so that one instruction widens, scales and adds two sums.
DASLLAMA_INLINE Ints tile_scale(Ints scale) {
  return bit_or(bit_and(scale, splat_ints(0xffff)), shift_left(scale, 16));
}
// Adds to sum the products of kGroup elements times the scales; what the bias adds to them is left to `unbias`. The upper
// plane counts 16 times: scales of types with two planes are below 2,048 (IQ4_XS: 32).
template <int kMax, int kGroup, bool kBiased, int MR, int NR>
DASLLAMA_INLINE void tile_scaled_dots(const uint8_t* const* panel, const int8_t* const* x, const int32_t* const*,
                                      const Ints (&scale)[NR], Ints (&sum)[MR][NR]) {
  tile_pairs<kMax, kGroup, MR, NR>(panel, x, [&](int m, int n, int plane, Ints pairs) __attribute__((always_inline)) {
    sum[m][n] = in_order(add(sum[m][n], _mm256_madd_epi16(pairs, plane ? _mm256_slli_epi16(scale[n], 4) : scale[n])));
  });
}
// Takes kBias times the sums of x in each group, times its scale, from sum.
template <int kBias, int kGroups>
DASLLAMA_INLINE Ints unbias(Ints sum, const Ints* scale, const int16_t* x_sums) {
  Ints low = zero_ints();
#pragma GCC unroll 8
  for (int g = 0; g < kGroups; g += 2) {
    int32_t pair;
    std::memcpy(&pair, x_sums + g, 4);
    low = add(low, mul_pairs(_mm256_blend_epi16(scale[g], scale[g + 1], 0xaa), splat_ints(pair)));
  }
  return add(sum, mul(low, splat_ints(-kBias)));
}

}  // namespace int_dot
}  // namespace
}  // namespace dasllama
