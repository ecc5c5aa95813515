// Decoding of the common packed types in vectors, for a strip of kLanes weight rows. The scalar twin of every type is in
// ../blocks.h; what is decoded here are the same integers and floats.
//
// A group is the elements that share a scale: 32 or 16, that is kParts = 2 or 1 units of 16 bytes. `unpack` turns a piece
// of one row into weights: vector part holds, in unit i, elements 16 * part .. 16 * part + 15 of some group i. A weight
// is stored as weight + kBias, a byte in 0 .. kMax, or, with kMax = 128, as a signed byte with its sign bit flipped where
// the instruction set wants that (kFlip). Scales come for the whole strip at once: lane r belongs to row r.
#pragma once
#include "../blocks.h"
#if defined(DASLLAMA_ISA_AVX512)
#include "simd_avx512.h"
#include "gathers_x86.h"
#include "wide_sums.h"
#elif defined(DASLLAMA_ISA_AVX2)
#include "simd_avx2.h"
#include "gathers_x86.h"
#else
#include "simd_neon.h"
#include "wide_sums.h"
#endif

namespace dasllama {
namespace {
namespace int_dot {

constexpr int kSignedBias = kFlip;

// kUnits blocks of one row, kBytes apart; only the first `last + 1` exist where kFull is false.
template <int kBytes, bool kFull>
struct Span {
  const uint8_t* p;
  int last;
  DASLLAMA_INLINE Ints load(int at) const {
    return kFull ? load_units(p + at, kBytes) : load_units(p + at, kBytes, last);
  }
};

// Sixteen signed values for `lookup`, in the form in which weights are multiplied.
template <int kXor>
DASLLAMA_INLINE Ints value_table(const int8_t* values) {
  return bit_xor(repeat_unit(load_unit(reinterpret_cast<const uint8_t*>(values))), splat_bytes(kXor));
}

// ---- blocks of 32: two parts. Each gives d (and m) from the first four bytes of a block. --------------------------------

struct F16Scale {
  static DASLLAMA_INLINE Floats d(Ints head) { return low_half(head); }
};

// 16 bytes of nibbles at kAt: the low ones are elements 0 to 15. kAdd: the type has an m, an f16 after d.
template <int kBlockBytes, int kAt, int kOffset, bool kHasM>
struct Nibbles : F16Scale {
  static constexpr int kBytes = kBlockBytes, kMax = 15, kBias = kOffset;
  static constexpr bool kAdd = kHasM;
  template <class S>
  static DASLLAMA_INLINE void unpack(S s, Ints* w) {
    const Ints q = s.load(kAt);
    w[0] = low_nibbles(q);
    w[1] = high_nibbles(q);
  }
};
typedef Nibbles<18, 2, 8, false> FastQ4_0;
typedef Nibbles<20, 4, 0, true> FastQ4_1;

// The same after 32 fifth bits, in the elements' order, at kAt.
template <int kBlockBytes, int kAt, int kOffset, bool kHasM>
struct FiveBits : F16Scale {
  static constexpr int kBytes = kBlockBytes, kMax = 31, kBias = kOffset;
  static constexpr bool kAdd = kHasM;
  template <class S>
  static DASLLAMA_INLINE void unpack(S s, Ints* w) {
    const Ints head = s.load(0), q = s.load(kAt + 4);
    w[0] = add_fifth_bits(low_nibbles(q), head, kAt);
    w[1] = add_fifth_bits(high_nibbles(q), head, kAt + 2);
  }
};
typedef FiveBits<22, 2, 16, false> FastQ5_0;
typedef FiveBits<24, 4, 0, true> FastQ5_1;

struct FastQ8_0 : F16Scale {
  static constexpr int kBytes = 34, kMax = 128, kBias = kSignedBias;
  static constexpr bool kAdd = false;
  template <class S>
  static DASLLAMA_INLINE void unpack(S s, Ints* w) {
    w[0] = bit_xor(s.load(2), splat_bytes(kFlip));
    w[1] = bit_xor(s.load(18), splat_bytes(kFlip));
  }
};

struct FastIQ4_NL : F16Scale {
  static constexpr int kBytes = 18, kMax = 128, kBias = kSignedBias;
  static constexpr bool kAdd = false;
  template <class S>
  static DASLLAMA_INLINE void unpack(S s, Ints* w) {
    const Ints table = value_table<kFlip>(IQ4_VALUES);
    const Ints q = s.load(2);
    w[0] = lookup(table, low_nibbles(q));
    w[1] = lookup(table, high_nibbles(q));
  }
};

struct FastMXFP4 {
  static constexpr int kBytes = 17, kMax = 24, kBias = 12;  // FP4_VALUES are -12 to 12
  static constexpr bool kAdd = false;
  template <class S>
  static DASLLAMA_INLINE void unpack(S s, Ints* w) {
    const Ints table = add_bytes(value_table<0>(FP4_VALUES), splat_bytes(kBias));
    const Ints q = s.load(1);
    w[0] = lookup(table, low_nibbles(q));
    w[1] = lookup(table, high_nibbles(q));
  }
  // mxfp4_scale of blocks.h: (e - 1) << 23, and 0x00200000 << e for the subnormal e = 0 and 1.
  static DASLLAMA_INLINE Floats d(Ints head) {
    const Ints e = bit_and(head, splat_ints(255)), less = add(e, splat_ints(-1));
    const Ints tiny = shift_left(add(e, splat_ints(1)), 21);
    return as_floats(select_less(e, 2, tiny, shift_left(less, 23)));
  }
};

// ---- blocks of 256 ---------------------------------------------------------------------------------------------------

// The scales of 256 elements of a strip, kGroups of them, in the order in which the fold wants them.
template <int kGroups, bool kMin>
struct SuperScales {
  Floats d, dmin;
  Ints scale[kGroups];
  Ints mins[kMin ? kGroups / 2 : 1];  // pairs of 16 bits: the even group's min is the lower
};

// A step decodes kSets * kUnits groups: set s, unit i is group(step, s, i), its parts are w[s * kParts + part]. Here, in
// their order.
template <int kGroup, int kSetsPerStep, bool kHasMin>
struct SuperLayout {
  static constexpr int kBlock = 256, kSets = kSetsPerStep;
  static constexpr bool kMin = kHasMin;
  static constexpr int kParts = kGroup / 16, kGroups = 256 / kGroup, kSteps = kGroups / (kSets * kUnits);
  static constexpr int group(int step, int set, int i) { return (step * kSets + set) * kUnits + i; }
  typedef SuperScales<kGroups, kMin> Scales;
};

// Where d is: the lower or the upper half of the four bytes at kHead.
template <int kAt>
struct F16Head : F16Scale {
  static constexpr int kHead = kAt;
};
template <int kBytes>
struct F16Tail {
  static constexpr int kHead = kBytes - 4;
  static DASLLAMA_INLINE Floats d(Ints head) { return high_half(head); }
};

// Byte i of each lane.
DASLLAMA_INLINE Ints byte_of(Ints v, int i) { return bit_and(shift_right(v, 8 * i), splat_ints(255)); }

// The 16 bytes d, dmin and 8 scales and mins of 6 bits that begin a block of Q4_K and Q5_K.
DASLLAMA_INLINE void six_bit_scales(const uint8_t* block, const Offsets& offset, SuperScales<8, true>& out) {
  Ints ints[4];
  gather_lanes(block, offset, ints);
  const Ints head = ints[0], low = ints[1], mid = ints[2], high = ints[3];
  const Ints six = splat_bytes(0x3f), four = splat_bytes(0x0f), top = splat_bytes(0x30);
  out.d = low_half(head);
  out.dmin = high_half(head);
  const Ints scale[2] = {bit_and(low, six), bit_or(bit_and(high, four), bit_and(shift_right(low, 2), top))};
  const Ints min[2] = {bit_and(mid, six), bit_or(bit_and(shift_right(high, 4), four), bit_and(shift_right(mid, 2), top))};
  for (int half = 0; half < 2; half++) {
    for (int i = 0; i < 4; i++) out.scale[4 * half + i] = byte_of(scale[half], i);
    for (int i = 0; i < 2; i++) {
      const Ints even = byte_of(min[half], 2 * i), odd = byte_of(min[half], 2 * i + 1);
      out.mins[2 * half + i] = bit_or(even, shift_left(odd, 16));
    }
  }
}

// Chunk c of 32 bytes holds group 2 c in its low nibbles and group 2 c + 1 in its high ones; unit i takes chunk
// step * kUnits + i.
struct FastQ4_K : SuperLayout<32, 2, true>, F16Head<0> {
  static constexpr int kBytes = 144, kMax = 15, kBias = 0;
  static constexpr int group(int step, int set, int i) { return 2 * (step * kUnits + i) + set; }
  static DASLLAMA_INLINE void unpack(const uint8_t* block, int step, Ints* w) {
    Ints q[2];
    load_dealt_units(block + 16 + 32 * kUnits * step, q);
    for (int part = 0; part < 2; part++) {
      w[part] = low_nibbles(q[part]);
      w[2 + part] = high_nibbles(q[part]);
    }
  }
  static DASLLAMA_INLINE void scales(const uint8_t* block, const Offsets& offset, Scales& out) {
    six_bit_scales(block, offset, out);
  }
};

// Q4_K with a fifth bit: bit g of byte i belongs to element i of group g.
struct FastQ5_K : SuperLayout<32, 2, true>, F16Head<0> {
  static constexpr int kBytes = 176, kMax = 31, kBias = 0;
  static constexpr int group(int step, int set, int i) { return 2 * (step * kUnits + i) + set; }
  static DASLLAMA_INLINE void unpack(const uint8_t* block, int step, Ints* w) {
    Ints q[2];
    load_dealt_units(block + 48 + 32 * kUnits * step, q);
    for (int part = 0; part < 2; part++) {
      const Ints bits = shift_units(repeat_unit(load_unit(block + 16 + 16 * part)), 2 * kUnits * step, 2);
      w[part] = bit_or(low_nibbles(q[part]), shift_left(bit_and(bits, splat_bytes(1)), 4));
      w[2 + part] = bit_or(high_nibbles(q[part]), shift_left(bit_and(bits, splat_bytes(2)), 3));
    }
  }
  static DASLLAMA_INLINE void scales(const uint8_t* block, const Offsets& offset, Scales& out) {
    six_bit_scales(block, offset, out);
  }
};

// Halves of 128 elements: groups 0 to 3 of a half are the low nibbles of 64 bytes, 4 to 7 the high ones; the upper two
// bits of groups g, g + 1 (g even) are bits g, g + 1 of 32 bytes.
struct FastQ6_K : SuperLayout<16, 2, false>, F16Tail<210> {
  static constexpr int kBytes = 210, kMax = 63, kBias = 32;
  static constexpr int kPerHalf = 4 / kUnits;
  static constexpr int group(int step, int set, int i) {
    return step / kPerHalf * 8 + set * 4 + step % kPerHalf * kUnits + i;
  }
  static DASLLAMA_INLINE void unpack(const uint8_t* block, int step, Ints* w) {
    const int half = step / kPerHalf, piece = step % kPerHalf;
    const Ints q = load_ints(block + 64 * half + 16 * kUnits * piece);
    const Ints bits = shift_unit_pairs(load_unit_pair(block + 128 + 32 * half), 2 * piece, 2);
    w[0] = bit_or(low_nibbles(q), shift_left(bit_and(bits, splat_bytes(3)), 4));
    w[1] = bit_or(high_nibbles(q), bit_and(bits, splat_bytes(0x30)));
  }
  static DASLLAMA_INLINE void scales(const uint8_t* block, const Offsets& offset, Scales& out) {
    Ints fours[4];
    gather_lanes(block + 192, offset, fours);
    out.d = d(gather_lanes(block + kHead, offset));
    for (int i = 0; i < 4; i++)
      for (int j = 0; j < 4; j++) out.scale[4 * i + j] = shift_right_signed(shift_left(fours[i], 24 - 8 * j), 24);
  }
};

struct FastIQ4_XS : SuperLayout<32, 1, false>, F16Head<0> {
  static constexpr int kBytes = 136, kMax = 128, kBias = kSignedBias;
  static DASLLAMA_INLINE void unpack(const uint8_t* block, int step, Ints* w) {
    const Ints table = value_table<kFlip>(IQ4_VALUES);
    const Ints q = load_ints(block + 8 + 16 * kUnits * step);
    w[0] = lookup(table, low_nibbles(q));
    w[1] = lookup(table, high_nibbles(q));
  }
  static DASLLAMA_INLINE void scales(const uint8_t* block, const Offsets& offset, Scales& out) {
    Ints ints[2];
    gather_lanes(block, offset, ints);
    const Ints head = ints[0], low = ints[1];
    out.d = d(head);
    for (int g = 0; g < 8; g++) {
      const Ints four = bit_and(shift_right(low, 4 * g), splat_ints(15));
      const Ints two = bit_and(shift_right(head, 16 + 2 * g), splat_ints(3));
      out.scale[g] = add(bit_or(four, shift_left(two, 4)), splat_ints(-32));
    }
  }
};

// 2-bit fields of all 256 elements in 64 bytes, 32 for each half: bits 2 s, 2 s + 1 of them are groups 2 s and 2 s + 1. A
// step takes two fields of the units column .. column + kUnits - 1.
template <bool kHasMin>
struct Crumbs : SuperLayout<16, 2, kHasMin> {
  static constexpr int column(int step) { return step / 2 * kUnits; }
  static constexpr int shift(int step) { return step % 2 * 4; }
  static constexpr int group(int step, int set, int i) {
    return (column(step) + i) / 2 * 8 + shift(step) + 2 * set + i % 2;
  }
  static DASLLAMA_INLINE void fields(const uint8_t* p, int step, Ints* w) {
    const Ints q = shift_right(load_ints(p + 16 * column(step)), shift(step));
    w[0] = bit_and(q, splat_bytes(3));
    w[1] = bit_and(shift_right(q, 2), splat_bytes(3));
  }
};

struct FastQ2_K : Crumbs<true>, F16Head<80> {
  static constexpr int kBytes = 84, kMax = 3, kBias = 0;
  static DASLLAMA_INLINE void unpack(const uint8_t* block, int step, Ints* w) { fields(block + 16, step, w); }
  static DASLLAMA_INLINE void scales(const uint8_t* block, const Offsets& offset, Scales& out) {
    const Ints head = gather_lanes(block + kHead, offset);
    out.d = d(head);
    out.dmin = high_half(head);
    Ints fours[4];
    gather_lanes(block, offset, fours);
    for (int i = 0; i < 4; i++) {
      const Ints scale = low_nibbles(fours[i]), min = high_nibbles(fours[i]);
      for (int j = 0; j < 4; j++) out.scale[4 * i + j] = byte_of(scale, j);
      for (int j = 0; j < 2; j++)
        out.mins[2 * i + j] = bit_or(byte_of(min, 2 * j), shift_left(byte_of(min, 2 * j + 1), 16));
    }
  }
};

// A third bit after 32 bytes of them: bit s of a byte belongs to field s of the first half, bit s + 4 of the second.
struct FastQ3_K : Crumbs<false>, F16Tail<110> {
  static constexpr int kBytes = 110, kMax = 7, kBias = 4;
  static DASLLAMA_INLINE void unpack(const uint8_t* block, int step, Ints* w) {
    const Ints bits = shift_unit_pairs(load_unit_pair(block), 2 * column(step) + shift(step) / 2, 4);
    fields(block + 32, step, w);
    w[0] = bit_or(w[0], bit_and(shift_left(bits, 2), splat_bytes(4)));
    w[1] = bit_or(w[1], bit_and(shift_left(bits, 1), splat_bytes(4)));
  }
  // 16 times 4 bits, then 16 times 2: byte i of the former has scales i and i + 8, of the latter i, i + 4, i + 8, i + 12.
  static DASLLAMA_INLINE void scales(const uint8_t* block, const Offsets& offset, Scales& out) {
    Ints ints[4];  // of which the lowest two bytes belong to something else
    gather_lanes(block + 94, offset, ints);
    const auto across = [&](int i) { return bit_or(shift_right(ints[i], 16), shift_left(ints[i + 1], 16)); };
    const Ints low[2] = {across(0), across(1)}, high = across(2);
    out.d = d(ints[3]);
    for (int i = 0; i < 4; i++) {
      const Ints four = i < 2 ? low_nibbles(low[i]) : high_nibbles(low[i - 2]);
      const Ints two = bit_and(shift_right(high, 2 * i), splat_bytes(3));
      const Ints six = bit_or(four, shift_left(two, 4));
      for (int j = 0; j < 4; j++) out.scale[4 * i + j] = add(byte_of(six, j), splat_ints(-32));
    }
  }
};

struct FastTQ2_0 : Crumbs<false>, F16Tail<66> {
  static constexpr int kBytes = 66, kMax = 3, kBias = 1;
  static DASLLAMA_INLINE void unpack(const uint8_t* block, int step, Ints* w) { fields(block, step, w); }
  static DASLLAMA_INLINE void scales(const uint8_t* block, const Offsets& offset, Scales& out) {
    out.d = d(gather_lanes(block + kHead, offset));
    for (Ints& scale : out.scale) scale = splat_ints(1);
  }
};

}  // namespace int_dot
}  // namespace
}  // namespace dasllama
