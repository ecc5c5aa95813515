// The vectors of the integer matmul in NEON with dot products. simd_avx2.h offers the same names.
//
// A vector is two registers: kUnits = 2 units of 16 bytes, or kLanes = 8 lanes of 32 bits. Eight weight rows make a
// strip, and a lane stands for a row. sdot multiplies signed bytes and sums up in 32 bits, so weights of every type
// stay as they are unpacked, and no sum needs to be widened.
#pragma once
#include <arm_neon.h>

#include <cstdint>

#include "lanes.h"

namespace dasllama {
namespace {
namespace int_dot {

typedef ivec Unit;
typedef Two<ivec> Ints;
typedef Two<fvec> Floats;
struct Offsets {  // of kLanes rows from the first of them; general registers address memory
  int32_t of[8];
};
constexpr int kUnits = 2, kLanes = 8;
constexpr int kTileRows = 4, kTileStrips = 1;  // the register tile: rows of x by strips of w
constexpr int kFlip = 0;                       // signed weights stay signed

// One register as bytes, as f16 or as other integers.
DASLLAMA_INLINE uint8x16_t bytes(ivec v) { return (uint8x16_t)v; }
DASLLAMA_INLINE int8x16_t signed_bytes(ivec v) { return (int8x16_t)v; }
DASLLAMA_INLINE ivec ints(uint8x16_t v) { return (ivec)v; }

DASLLAMA_INLINE ivec load_unit(const uint8_t* p) { return (ivec)vld1q_u8(p); }
DASLLAMA_INLINE Ints repeat_unit(ivec unit) { return {unit, unit}; }

DASLLAMA_INLINE Ints zero_ints() { return Ints{}; }
DASLLAMA_INLINE Ints splat_ints(int32_t v) { return repeat_unit((ivec)vdupq_n_s32(v)); }
DASLLAMA_INLINE Ints splat_bytes(int v) { return repeat_unit((ivec)vdupq_n_s8(static_cast<int8_t>(v))); }
DASLLAMA_INLINE Ints load_ints(const void* p) {
  const uint8_t* at = static_cast<const uint8_t*>(p);
  return {load_unit(at), load_unit(at + 16)};
}
DASLLAMA_INLINE void store_ints(void* p, Ints v) {
  uint8_t* at = static_cast<uint8_t*>(p);
  vst1q_u8(at, bytes(v.lo));
  vst1q_u8(at + 16, bytes(v.hi));
}
DASLLAMA_INLINE Floats zero_floats() { return Floats{}; }
DASLLAMA_INLINE Floats splat_floats(float f) { return splat<Floats>(f); }
DASLLAMA_INLINE Floats load_floats(const float* p) { return load<Floats>(p); }
DASLLAMA_INLINE void store_floats(float* p, Floats v) { store(p, v); }

DASLLAMA_INLINE Ints add(Ints a, Ints b) { return a + b; }
DASLLAMA_INLINE Ints add_bytes(Ints a, Ints b) {
  return {ints(vaddq_u8(bytes(a.lo), bytes(b.lo))), ints(vaddq_u8(bytes(a.hi), bytes(b.hi)))};
}
DASLLAMA_INLINE Ints mul(Ints a, Ints b) { return a * b; }
DASLLAMA_INLINE ivec mul_pairs(ivec a, ivec b) {
  const int16x8_t x = (int16x8_t)a, y = (int16x8_t)b;
  return (ivec)vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_high_s16(x, y));
}
DASLLAMA_INLINE Ints mul_pairs(Ints a, Ints b) { return {mul_pairs(a.lo, b.lo), mul_pairs(a.hi, b.hi)}; }
DASLLAMA_INLINE Ints bit_and(Ints a, Ints b) { return a & b; }
DASLLAMA_INLINE Ints bit_or(Ints a, Ints b) { return {a.lo | b.lo, a.hi | b.hi}; }
DASLLAMA_INLINE Ints bit_xor(Ints a, Ints b) { return {a.lo ^ b.lo, a.hi ^ b.hi}; }
DASLLAMA_INLINE Ints shift_left(Ints a, int n) { return {a.lo << n, a.hi << n}; }
DASLLAMA_INLINE ivec shift_right(ivec a, int n) { return (ivec)((uint32x4_t)a >> n); }
DASLLAMA_INLINE Ints shift_right(Ints a, int n) { return {shift_right(a.lo, n), shift_right(a.hi, n)}; }
DASLLAMA_INLINE Ints shift_right_signed(Ints a, int n) { return {a.lo >> n, a.hi >> n}; }
DASLLAMA_INLINE Floats to_floats(Ints a) {
  return {__builtin_convertvector(a.lo, fvec), __builtin_convertvector(a.hi, fvec)};
}
DASLLAMA_INLINE Floats as_floats(Ints a) { return {(fvec)a.lo, (fvec)a.hi}; }
DASLLAMA_INLINE Floats mul(Floats a, Floats b) { return a * b; }
DASLLAMA_INLINE Floats add(Floats a, Floats b) { return a + b; }
using ::fma;
DASLLAMA_INLINE Floats fnma(Floats a, Floats b, Floats c) {  // c - a * b
  return {vfmsq_f32(c.lo, a.lo, b.lo), vfmsq_f32(c.hi, a.hi, b.hi)};
}
DASLLAMA_INLINE Ints select_less(Ints a, int than, Ints yes, Ints no) {
  return {a.lo < than ? yes.lo : no.lo, a.hi < than ? yes.hi : no.hi};
}

// The f16 in the low (high) half of each lane.
DASLLAMA_INLINE Floats low_half(Ints a) {
  const auto widen = [](ivec v) { return (fvec)vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32((uint32x4_t)v))); };
  return {widen(a.lo), widen(a.hi)};
}
DASLLAMA_INLINE Floats high_half(Ints a) { return low_half(shift_right(a, 16)); }

DASLLAMA_INLINE Ints join_units(const Unit (&unit)[2]) { return {unit[0], unit[1]}; }
// Units at p, p + step, ...; with `last` no unit beyond that one is read, it is repeated instead.
DASLLAMA_INLINE Ints load_units(const uint8_t* p, int64_t step) { return {load_unit(p), load_unit(p + step)}; }
DASLLAMA_INLINE Ints load_units(const uint8_t* p, int64_t step, int last) {
  return load_units(p, (last < 1 ? last : 1) * step);
}
// Halves of units, from p on: each fills a unit, twice.
DASLLAMA_INLINE Ints load_halves_twice(const uint8_t* p) {
  return {ints(vcombine_u8(vld1_u8(p), vld1_u8(p))), ints(vcombine_u8(vld1_u8(p + 8), vld1_u8(p + 8)))};
}
DASLLAMA_INLINE Offsets load_offsets(const int32_t* p) {
  Offsets offset;
  std::memcpy(offset.of, p, sizeof offset.of);
  return offset;
}
DASLLAMA_INLINE Ints gather_lanes(const uint8_t* base, const Offsets& offset) {
  const auto four = [&](const int32_t* of) {
    ivec v = {};
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      int32_t lane;
      std::memcpy(&lane, base + of[i], 4);
      v[i] = lane;
    }
    return v;
  };
  return {four(offset.of), four(offset.of + 4)};
}
// The same of eight or sixteen bytes.
template <int kInts>
DASLLAMA_INLINE void gather_lanes(const uint8_t* base, const Offsets& offset, Ints (&out)[kInts]) {
  for (int i = 0; i < kInts; i++) out[i] = gather_lanes(base + 4 * i, offset);
}
// kLanes bytes, a lane each.
DASLLAMA_INLINE Ints widen_bytes(const uint8_t* p, bool is_signed) {
  const uint8x8_t eight = vld1_u8(p);
  const int16x8_t wide = is_signed ? vmovl_s8(vreinterpret_s8_u8(eight)) : vreinterpretq_s16_u16(vmovl_u8(eight));
  return {(ivec)vmovl_s16(vget_low_s16(wide)), (ivec)vmovl_high_s16(wide)};
}
DASLLAMA_INLINE float f16_at(const uint8_t* p) {
  return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(load_u16(p)))), 0);
}

DASLLAMA_INLINE Ints low_nibbles(Ints v) { return bit_and(v, splat_bytes(15)); }
DASLLAMA_INLINE Ints high_nibbles(Ints v) {
  return {ints(vshrq_n_u8(bytes(v.lo), 4)), ints(vshrq_n_u8(bytes(v.hi), 4))};
}
// table: one unit, repeated.
DASLLAMA_INLINE Ints lookup(Ints table, Ints index) {
  return {ints(vqtbl1q_u8(bytes(table.lo), bytes(index.lo))), ints(vqtbl1q_u8(bytes(table.hi), bytes(index.hi)))};
}
// v shifted right by `first` bits in unit 0, by `step` more in each next unit; bits cross bytes within 32.
DASLLAMA_INLINE Ints shift_units(Ints v, int first, int step) {
  return {shift_right(v.lo, first), shift_right(v.hi, first + step)};
}
// Two units.
DASLLAMA_INLINE Ints load_unit_pair(const uint8_t* p) { return load_ints(p); }
// v shifted right by `first` bits in units 0 and 1 (by `step` more in the next two, which only AVX-512 has).
DASLLAMA_INLINE Ints shift_unit_pairs(Ints v, int first, int) { return shift_right(v, first); }
// v plus 16 in the bytes j of each unit for which bit j of that unit's bytes `at` and `at + 1` in bits is set.
DASLLAMA_INLINE Ints add_fifth_bits(Ints v, Ints bits, int at) {
  const uint8x16_t one = (uint8x16_t)vdupq_n_u64(0x8040201008040201);
  const uint8x16_t from = vcombine_u8(vdup_n_u8(static_cast<uint8_t>(at)), vdup_n_u8(static_cast<uint8_t>(at + 1)));
  const auto plus = [&](ivec v, ivec bits) {
    const uint8x16_t set = vtstq_u8(vqtbl1q_u8(bytes(bits), from), one);
    return ints(vorrq_u8(bytes(v), vandq_u8(set, vdupq_n_u8(16))));
  };
  return {plus(v.lo, bits.lo), plus(v.hi, bits.hi)};
}
// A vector of points of a grid, put together in registers: a load waits long for parts that were only just stored.
template <int kLength>
DASLLAMA_INLINE Ints points(const int8_t (*grid)[kLength], const uint16_t* index) {
  typedef std::conditional_t<kLength == 8, int64_t, int32_t> Point;
  typedef Point Points __attribute__((vector_size(16)));
  const auto unit = [&](const uint16_t* index) {
    Points v = {};
#pragma GCC unroll 4
    for (int i = 0; i < 16 / kLength; i++) {
      Point point;
      std::memcpy(&point, grid[index[i]], kLength);
      v[i] = point;
    }
    return (ivec)v;
  };
  return {unit(index), unit(index + 16 / kLength)};
}
// a + b, but a - b in the bytes whose bit is set: bit j % 8 of bits[j / 8] for byte j.
DASLLAMA_INLINE Ints plus_minus(Ints a, Ints b, const uint8_t* bits) {
  const uint8x16_t one = (uint8x16_t)vdupq_n_u64(0x8040201008040201);
  const auto sum = [&](ivec a, ivec b, const uint8_t* two) {
    const uint8x16_t minus = vtstq_u8(vcombine_u8(vdup_n_u8(two[0]), vdup_n_u8(two[1])), one);
    return ints(vbslq_u8(minus, vsubq_u8(bytes(a), bytes(b)), vaddq_u8(bytes(a), bytes(b))));
  };
  return {sum(a.lo, b.lo, bits), sum(a.hi, b.hi, bits + 2)};
}

DASLLAMA_INLINE ivec add_dots(ivec sum, ivec w, ivec a) {
  return (ivec)vdotq_s32((int32x4_t)sum, signed_bytes(w), signed_bytes(a));
}
// Products of 16-element units (one, or two that belong to one group), four sums of 32 bits per unit.
template <int kMax>
DASLLAMA_INLINE Ints dot(Ints w, Ints a) {
  return {add_dots(ivec{}, w.lo, a.lo), add_dots(ivec{}, w.hi, a.hi)};
}
template <int kMax>
DASLLAMA_INLINE Ints dot(Ints w0, Ints a0, Ints w1, Ints a1) {
  const Ints first = dot<kMax>(w0, a0);
  return {add_dots(first.lo, w1.lo, a1.lo), add_dots(first.hi, w1.hi, a1.hi)};
}

// Four rows' dots of kParts units -> in each unit, the four rows' sums over it.
template <int kMax, int kParts>
DASLLAMA_INLINE Ints sum_quad(Ints a, Ints b, Ints c, Ints d) {
  const auto sums = [](ivec a, ivec b, ivec c, ivec d) { return (ivec)vpaddq_s32(vpaddq_s32(a, b), vpaddq_s32(c, d)); };
  return {sums(a.lo, b.lo, c.lo, d.lo), sums(a.hi, b.hi, c.hi, d.hi)};
}
// Four rows of units -> v[i] holds, in each unit, the four rows' i-th 32 bits.
DASLLAMA_INLINE void transpose_quad(Ints* v) {
  const auto transpose = [](ivec& r0, ivec& r1, ivec& r2, ivec& r3) {
    const int64x2_t a = (int64x2_t)vtrn1q_s32(r0, r1), b = (int64x2_t)vtrn1q_s32(r2, r3);
    const int64x2_t c = (int64x2_t)vtrn2q_s32(r0, r1), d = (int64x2_t)vtrn2q_s32(r2, r3);
    r0 = (ivec)vtrn1q_s64(a, b);
    r1 = (ivec)vtrn1q_s64(c, d);
    r2 = (ivec)vtrn2q_s64(a, b);
    r3 = (ivec)vtrn2q_s64(c, d);
  };
  transpose(v[0].lo, v[1].lo, v[2].lo, v[3].lo);
  transpose(v[0].hi, v[1].hi, v[2].hi, v[3].hi);
}
// Unit i of v[j] changes places with unit j of v[i].
DASLLAMA_INLINE void transpose_units(Ints* v) {
  const ivec unit = v[0].hi;
  v[0].hi = v[1].lo;
  v[1].lo = unit;
}

// Units at p, p + 32, ... to w[0], those between them to w[1].
DASLLAMA_INLINE void load_dealt_units(const uint8_t* p, Ints* w) {
  w[0] = load_units(p, 32);
  w[1] = load_units(p + 16, 32);
}
// The units of a and b, one after the other: even ones to w[0], odd ones to w[1].
DASLLAMA_INLINE void deal_units(Ints a, Ints b, Ints* w) {
  w[0] = {a.lo, b.lo};
  w[1] = {a.hi, b.hi};
}

// One vector of each strip times the four bytes `kFour` of 16 of each row of x.
template <int kFour, int MR, int NR>
DASLLAMA_INLINE void tile_four(const uint8_t* const* panel, int k, const int8x16_t* x, Ints (&sum)[MR][NR]) {
#pragma GCC unroll 4
  for (int n = 0; n < NR; n++) {
    const Ints w = load_ints(panel[n] + (k + 4 * kFour) * kLanes);
#pragma GCC unroll 8
    for (int m = 0; m < MR; m++) {
      sum[m][n].lo = (ivec)vdotq_laneq_s32((int32x4_t)sum[m][n].lo, signed_bytes(w.lo), x[m], kFour);
      sum[m][n].hi = (ivec)vdotq_laneq_s32((int32x4_t)sum[m][n].hi, signed_bytes(w.hi), x[m], kFour);
    }
  }
}
// Sums of kGroup products for MR rows of x by NR strips: panel[n] holds kGroup / 4 vectors of 4 weights per lane.
template <int kMax, int kGroup, int MR, int NR>
DASLLAMA_INLINE void tile_dots(const uint8_t* const* panel, const int8_t* const* x, Ints (&sum)[MR][NR]) {
#pragma GCC unroll 2
  for (int k = 0; k < kGroup; k += 16) {
    int8x16_t sixteen[MR];
#pragma GCC unroll 8
    for (int m = 0; m < MR; m++) sixteen[m] = vld1q_s8(x[m] + k);
    tile_four<0>(panel, k, sixteen, sum);
    tile_four<1>(panel, k, sixteen, sum);
    tile_four<2>(panel, k, sixteen, sum);
    tile_four<3>(panel, k, sixteen, sum);
  }
}

}  // namespace int_dot
}  // namespace
}  // namespace dasllama
