// Decoding in vectors of the types that are better taken apart in one go than piece by piece: `decode` writes a row's next
// elements in their order, as bytes weight + kBias. Scales come for a strip at once, as in blocks_simd.h.
//
// Weights that are points of a grid: their indices and signs are laid out in plain arrays first, by loops that the compiler
// makes vectors of.
#pragma once
#include "blocks_simd.h"

namespace dasllama {
namespace {
namespace int_dot {

constexpr int kPiece = 16 * kUnits;  // weights in a vector

// ---- blocks of 256 ---------------------------------------------------------------------------------------------------

// A block's points of kLength elements; those whose bit is set are negated.
template <int kBias, int kPoints, int kLength>
DASLLAMA_INLINE void signed_points(const int8_t (&grid)[kPoints][kLength], const uint16_t (&index)[256 / kLength],
                                   const uint8_t (&signs)[32], uint8_t* q) {
  for (int k = 0; k < 256; k += kPiece)
    store_ints(q + k, plus_minus(splat_bytes(kBias), points(grid, index + k / kLength), signs + k / 8));
}

// For types whose `split` lays out a block's indices and signs.
template <class T>
DASLLAMA_INLINE void decode_split(const uint8_t* block, uint8_t* q) {
  uint16_t index[32];
  uint8_t signs[32];
  T::split(block, index, signs);
  signed_points<T::kBias>(T::kGrid, index, signs, q);
}

// Four times seven sign bits in each of 8 words, kStep bytes apart.
template <int kStep>
DASLLAMA_INLINE void even_signs_of_words(const uint8_t* p, uint8_t (&signs)[32]) {
  uint32_t bytes[8];
  for (int g = 0; g < 8; g++) {
    const uint32_t word = load_u32(p + kStep * g);
    bytes[g] = even_signs((word & 0x7f) | (word << 1 & 0x7f00) | (word << 2 & 0x7f0000) | (word << 3 & 0x7f000000));
  }
  std::memcpy(signs, bytes, sizeof bytes);
}

// Four 2-bit fields from each of kBytes bytes, from the lowest on.
template <int kBytes>
DASLLAMA_INLINE void fields_in_order(const uint8_t* p, uint8_t* out) {
  uint32_t fours[kBytes];
  for (int i = 0; i < kBytes; i++) {
    const uint32_t byte = p[i];
    fours[i] = (byte | byte << 6 | byte << 12 | byte << 18) & 0x03030303;
  }
  std::memcpy(out, fours, sizeof fours);
}

// kGroups scales 2 n + 1, n of 4 bits, the even group's in the lower half of a byte.
template <int kGroups>
DASLLAMA_INLINE void odd_scales(const uint8_t* block, const Offsets& offset, Ints (&scale)[kGroups]) {
  Ints fours[kGroups / 8];
  if constexpr (kGroups == 16)
    gather_lanes(block, offset, fours);
  else
    fours[0] = gather_lanes(block, offset);
  for (int i = 0; i < kGroups / 8; i++) {
    const Ints one = splat_bytes(1);
    const Ints even = bit_or(shift_left(low_nibbles(fours[i]), 1), one);
    const Ints odd = bit_or(shift_left(high_nibbles(fours[i]), 1), one);
    for (int j = 0; j < 4; j++) {
      scale[8 * i + 2 * j] = byte_of(even, j);
      scale[8 * i + 2 * j + 1] = byte_of(odd, j);
    }
  }
}

// 2 n + 1, n the highest 4 bits of a word; 8 words, kStep bytes apart.
template <int kStep>
DASLLAMA_INLINE void odd_scales_of_words(const uint8_t* block, const Offsets& offset, Ints (&scale)[8]) {
  for (int g = 0; g < 8; g++)
    scale[g] = bit_or(bit_and(shift_right(gather_lanes(block + kStep * g, offset), 27), splat_ints(30)), splat_ints(1));
}

DASLLAMA_INLINE Floats scaled_half(Ints head, float by) { return mul(low_half(head), splat_floats(by)); }

struct EighthHead {
  static constexpr int kHead = 0;
  static DASLLAMA_INLINE Floats d(Ints head) { return scaled_half(head, 0.125f); }
};

struct FastIQ2_XXS : SuperLayout<32, 1, false> {
  static constexpr int kBytes = 66, kMax = 86, kBias = 43;
  static DASLLAMA_INLINE void decode(const uint8_t* block, uint8_t* q) {
    uint16_t index[32];
    uint8_t signs[32];
    uint32_t fours[8];
    for (int g = 0; g < 8; g++) fours[g] = load_u32(block + 2 + 8 * g);
    uint8_t bytes[32];
    std::memcpy(bytes, fours, 32);
    for (int i = 0; i < 32; i++) index[i] = bytes[i];
    even_signs_of_words<8>(block + 6, signs);
    signed_points<kBias>(IQ2_XXS_GRID, index, signs, q);
  }
  static DASLLAMA_INLINE void scales(const uint8_t* block, const Offsets& offset, Scales& out) {
    out.d = scaled_half(gather_lanes(block, offset), 0.125f);
    odd_scales_of_words<8>(block + 6, offset, out.scale);
  }
};

struct FastIQ2_XS : SuperLayout<16, 1, false>, EighthHead {
  static constexpr int kBytes = 74, kMax = 86, kBias = 43;
  static constexpr const int8_t (&kGrid)[512][8] = IQ2_XS_GRID;
  static DASLLAMA_INLINE void split(const uint8_t* block, uint16_t (&index)[32], uint8_t (&signs)[32]) {
    for (int i = 0; i < 32; i++) {
      const uint16_t word = load_u16(block + 2 + 2 * i);
      index[i] = word & 511;
      signs[i] = static_cast<uint8_t>(even_signs(word >> 9));
    }
  }
  static DASLLAMA_INLINE void decode(const uint8_t* block, uint8_t* q) { decode_split<FastIQ2_XS>(block, q); }
  static DASLLAMA_INLINE void scales(const uint8_t* block, const Offsets& offset, Scales& out) {
    out.d = d(gather_lanes(block + kHead, offset));
    odd_scales(block + 66, offset, out.scale);
  }
};

struct FastIQ2_S : SuperLayout<16, 1, false>, EighthHead {
  static constexpr int kBytes = 82, kMax = 86, kBias = 43;
  static constexpr const int8_t (&kGrid)[1024][8] = IQ2_S_GRID;
  static DASLLAMA_INLINE void split(const uint8_t* block, uint16_t (&index)[32], uint8_t (&signs)[32]) {
    uint8_t high[32];
    fields_in_order<8>(block + 66, high);
    for (int i = 0; i < 32; i++) index[i] = block[2 + i] | high[i] << 8;
    std::memcpy(signs, block + 34, 32);
  }
  static DASLLAMA_INLINE void decode(const uint8_t* block, uint8_t* q) { decode_split<FastIQ2_S>(block, q); }
  static DASLLAMA_INLINE void scales(const uint8_t* block, const Offsets& offset, Scales& out) {
    out.d = d(gather_lanes(block + kHead, offset));
    odd_scales(block + 74, offset, out.scale);
  }
};

struct FastIQ3_XXS : SuperLayout<32, 1, false> {
  static constexpr int kBytes = 98, kMax = 124, kBias = 62;
  static DASLLAMA_INLINE void decode(const uint8_t* block, uint8_t* q) {
    uint16_t index[64];
    uint8_t signs[32];
    for (int i = 0; i < 64; i++) index[i] = block[2 + i];
    even_signs_of_words<4>(block + 66, signs);
    signed_points<kBias>(IQ3_XXS_GRID, index, signs, q);
  }
  static DASLLAMA_INLINE void scales(const uint8_t* block, const Offsets& offset, Scales& out) {
    out.d = scaled_half(gather_lanes(block, offset), 0.25f);
    odd_scales_of_words<4>(block + 66, offset, out.scale);
  }
};

struct FastIQ3_S : SuperLayout<32, 1, false> {
  static constexpr int kBytes = 110, kMax = 30, kBias = 15;
  static DASLLAMA_INLINE void decode(const uint8_t* block, uint8_t* q) {
    uint16_t index[64];
    uint8_t signs[32];
    uint8_t twice_high[64];
    for (int i = 0; i < 64; i += kPiece)
      store_ints(twice_high + i, plus_minus(splat_bytes(1), splat_bytes(-1), block + 66 + i / 8));
    for (int i = 0; i < 64; i++) index[i] = static_cast<uint16_t>(block[2 + i] | twice_high[i] << 7);
    std::memcpy(signs, block + 74, 32);
    signed_points<kBias>(IQ3_S_GRID, index, signs, q);
  }
  static DASLLAMA_INLINE void scales(const uint8_t* block, const Offsets& offset, Scales& out) {
    out.d = low_half(gather_lanes(block, offset));
    odd_scales(block + 106, offset, out.scale);
  }
};

// Points in eighths, and 1 more or, where its bit is set, 1 less.
template <int kBias>
DASLLAMA_INLINE void shifted_points(const uint16_t (&index)[32], const uint8_t (&minus)[32], uint8_t* q) {
  for (int k = 0; k < 256; k += kPiece) {
    const Ints eighths = shift_left(bit_and(points(IQ1_S_GRID, index + k / 8), splat_bytes(31)), 3);
    store_ints(q + k, plus_minus(add_bytes(eighths, splat_bytes(kBias)), splat_bytes(1), minus + k / 8));
  }
}

struct FastIQ1_S : SuperLayout<32, 1, false> {
  static constexpr int kBytes = 50, kMax = 18, kBias = 9;
  static DASLLAMA_INLINE void decode(const uint8_t* block, uint8_t* q) {
    uint16_t index[32];
    uint8_t minus[32];
    uint32_t high[8], signs[8];  // bytes of four points
    for (int g = 0; g < 8; g++) {
      const uint32_t word = load_u16(block + 34 + 2 * g);
      high[g] = (word & 7) | (word << 5 & 0x700) | (word << 10 & 0x70000) | (word << 15 & 0x7000000);
      signs[g] = 0u - (word >> 15);
    }
    uint8_t bytes[32];
    std::memcpy(bytes, high, 32);
    std::memcpy(minus, signs, 32);
    for (int i = 0; i < 32; i++) index[i] = static_cast<uint16_t>(block[2 + i] | bytes[i] << 8);
    shifted_points<kBias>(index, minus, q);
  }
  static DASLLAMA_INLINE void scales(const uint8_t* block, const Offsets& offset, Scales& out) {
    out.d = scaled_half(gather_lanes(block, offset), 0.125f);
    Ints twos[4];
    gather_lanes(block + 34, offset, twos);
    for (int i = 0; i < 4; i++) {
      out.scale[2 * i] = bit_or(bit_and(shift_right(twos[i], 11), splat_ints(14)), splat_ints(1));
      out.scale[2 * i + 1] = bit_or(bit_and(shift_right(twos[i], 27), splat_ints(14)), splat_ints(1));
    }
  }
};

struct FastIQ1_M : SuperLayout<16, 1, false> {
  static constexpr int kBytes = 56, kMax = 18, kBias = 9;
  static DASLLAMA_INLINE void decode(const uint8_t* block, uint8_t* q) {
    uint16_t index[32];
    uint8_t minus[32];
    for (int i = 0; i < 16; i++) {
      const int two = block[32 + i];
      index[2 * i] = static_cast<uint16_t>(block[2 * i] | (two << 8 & 0x700));
      index[2 * i + 1] = static_cast<uint16_t>(block[2 * i + 1] | (two << 4 & 0x700));
      minus[2 * i] = two & 0x08 ? 0xff : 0;
      minus[2 * i + 1] = two & 0x80 ? 0xff : 0;
    }
    shifted_points<kBias>(index, minus, q);
  }
  // Words of four times 3 bits; d is spread over their highest 4.
  static DASLLAMA_INLINE void scales(const uint8_t* block, const Offsets& offset, Scales& out) {
    Ints two[2];
    gather_lanes(block + 48, offset, two);
    const auto nibble = [&](int word, int shift) { return bit_and(shift_right(two[word], shift), splat_ints(15)); };
    const Ints low = bit_or(nibble(0, 12), shift_left(nibble(0, 28), 4));
    const Ints high = bit_or(nibble(1, 12), shift_left(nibble(1, 28), 4));
    out.d = scaled_half(bit_or(low, shift_left(high, 8)), 0.125f);
    for (int g = 0; g < 16; g++) {
      const Ints three = shift_right(two[g / 8], g / 4 % 2 * 16 + g % 4 * 3);
      out.scale[g] = add(shift_left(bit_and(three, splat_ints(7)), 1), splat_ints(1));
    }
  }
};

struct FastTQ1_0 : SuperLayout<32, 1, false> {
  static constexpr int kBytes = 54, kMax = 2, kBias = 1;
  static DASLLAMA_INLINE void decode(const uint8_t* block, uint8_t* q) { ternary_digits(block, q); }
  static DASLLAMA_INLINE void scales(const uint8_t* block, const Offsets& offset, Scales& out) {
    out.d = high_half(gather_lanes(block + 50, offset));
    for (Ints& scale : out.scale) scale = splat_ints(1);
  }
};

// ---- blocks of kSpan elements on the lattice Q8_0, of which `count` are decoded, from element k of a row on -------------

template <int kElements, int kBlockBytes>
struct Spans {
  static constexpr int kSpan = kElements, kBytes = kBlockBytes;
  static constexpr int64_t at(int64_t k) { return k / kSpan * kBytes; }
};

struct FastQ1_0 : Spans<128, 18> {
  static constexpr int kParts = 2, kMax = 2, kBias = 1;
  static DASLLAMA_INLINE void decode(const uint8_t* row, int64_t k, int count, uint8_t* q) {
    const uint8_t* bits = row + at(k) + 2 + k % kSpan / 8;
    for (int i = 0; i < count; i += kPiece)
      store_ints(q + i, plus_minus(splat_bytes(1), splat_bytes(-1), bits + i / 8));
  }
  static DASLLAMA_INLINE Floats d(const uint8_t* row, int64_t k, const Offsets& offset) {
    return low_half(gather_lanes(row + at(k), offset));
  }
};

struct FastQ2_0 : Spans<64, 18> {
  static constexpr int kParts = 2, kMax = 3, kBias = 1;
  static DASLLAMA_INLINE void decode(const uint8_t* row, int64_t k, int count, uint8_t* q) {
    for (int i = 0; i < count; i += kSpan) fields_in_order<16>(row + at(k + i) + 2, q + i);
  }
  static DASLLAMA_INLINE Floats d(const uint8_t* row, int64_t k, const Offsets& offset) {
    return low_half(gather_lanes(row + at(k), offset));
  }
};

// Four scales of 8 bits, then 8 bytes of nibbles for each of them: the low ones, then the high ones.
struct FastNVFP4 : Spans<64, 36> {
  static constexpr int kParts = 1, kMax = 24, kBias = 12;  // FP4_VALUES are -12 to 12
  static DASLLAMA_INLINE void decode(const uint8_t* row, int64_t k, int count, uint8_t* q) {
    const Ints table = add_bytes(value_table<0>(FP4_VALUES), splat_bytes(kBias));
    constexpr uint8_t kLow[16] = {15, 15, 15, 15, 15, 15, 15, 15};
    const Ints low = repeat_unit(load_unit(kLow)), high = bit_xor(low, splat_bytes(15));
    const uint8_t* p = row + at(k) + 4 + k % kSpan / 2;
    for (int i = 0; i < count; i += kPiece) {
      const Ints twice = load_halves_twice(p + i / 2);
      const Ints index = bit_or(bit_and(twice, low), bit_and(shift_right(twice, 4), high));
      store_ints(q + i, lookup(table, index));
    }
  }
  // nvfp4_scale of blocks.h; the bits of e4m3, as an f16, are 2^-7 of what it gives.
  static DASLLAMA_INLINE Floats d(const uint8_t* row, int64_t k, const Offsets& offset) {
    const Ints byte = byte_of(gather_lanes(row + at(k), offset), static_cast<int>(k % kSpan / 16));
    const Ints f16 = bit_and(shift_left(byte, 7), splat_ints(0x3f80));
    const Ints number = select_less(bit_xor(byte, splat_ints(0x7f)), 1, zero_ints(), f16);
    return mul(low_half(number), splat_floats(128));
  }
};

}  // namespace int_dot
}  // namespace
}  // namespace dasllama
