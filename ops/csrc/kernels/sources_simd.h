// Where the vector matmul gets a strip of weights from: Packed32 and Packed256 unpack the common types straight from the
// file's rows; Expanded32 and Expanded256 serve every other type through ../blocks.h, one row after the other.
//
// All of them offer, for a strip of kLanes rows (rows beyond the last are that one again):
//   begin(at, last)   take up groups at .. at + last (of 32 or 16 elements), or the block `at` of 256
//   unpack(r, ...)    weights of row r, as blocks_simd.h describes
//   d(i), m(i) or scales()   scales of the strip
#pragma once
#include "blocks_simd.h"

namespace dasllama {
namespace {
namespace int_dot {

typedef void (*Expand32)(const uint8_t* row, int64_t b, Block32& out);
typedef void (*Expand256)(const uint8_t* row, int64_t b, Block256& out);

constexpr int64_t kAhead = 8 << 10, kFar = 128 << 10;  // bytes: how much to have under way, and what caches surely keep

struct Nothing {};  // what Packed32 and Packed256 need to expand a block

struct Strip {
  const uint8_t* row[kLanes];
  Offsets offset;  // of each row from the first
  int64_t ahead;   // from what is read now to what to ask the memory for: the processor's own prefetch ends at each page

  Strip(const uint8_t* w, int64_t row_bytes, int64_t first, int64_t N) {
    alignas(64) int32_t offsets[kLanes];
    for (int r = 0; r < kLanes; r++) {
      const int64_t n = first + r < N ? first + r : N - 1;
      row[r] = w + n * row_bytes;
      offsets[r] = static_cast<int32_t>((n - first) * row_bytes);
    }
    offset = load_offsets(offsets);
    // Short rows end soon, and those below are being read already: ask for a strip below, or further on in long rows.
    const int64_t strip = row_bytes * kLanes;
    ahead = strip > kFar ? kFar / kLanes : strip < kAhead ? 2 * strip : strip;
  }

  // Asks for `bytes` bytes that row r will want after those at `at`.
  DASLLAMA_INLINE void prefetch(int r, int64_t at, int bytes) const {
#pragma GCC unroll 8
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(row[r] + at + ahead + i);
  }
};

template <class T>
struct Packed32 : T {
  typedef Nothing Expand;
  static constexpr int kBlock = 32, kParts = 2;
  const Strip& strip;
  int64_t at = 0;
  int last = 0;

  Packed32(const Strip& strip, Nothing) : strip(strip) {}
  DASLLAMA_INLINE void begin(int64_t group, int last_group) {
    at = group * T::kBytes;
    last = last_group;
  }
  template <bool kFull>
  DASLLAMA_INLINE void unpack(int r, Ints* w) const {
    strip.prefetch(r, at, kUnits * T::kBytes);
    T::unpack(Span<T::kBytes, kFull>{strip.row[r] + at, last}, w);
  }
  DASLLAMA_INLINE void scales(int i, Floats& d, Floats& m) const {
    const Ints head = gather_lanes(strip.row[0] + at + i * T::kBytes, strip.offset);
    d = T::d(head);
    if (T::kAdd) m = high_half(head);
  }
};

// kGroup is 16 for NVFP4, whose scales are per 16, and 32 otherwise.
template <int kGroup>
struct Expanded32 {
  typedef Expand32 Expand;
  static constexpr int kBlock = 32, kParts = kGroup / 16, kMax = 128, kBias = kSignedBias;
  static constexpr bool kAdd = false;
  const Strip& strip;
  Expand32 expand;
  int last = 0;
  alignas(64) uint8_t q[kLanes][kUnits * kGroup] = {};
  alignas(64) float floats[kUnits][kLanes] = {};

  Expanded32(const Strip& strip, Expand32 expand) : strip(strip), expand(expand) {}
  void begin(int64_t group, int last_group) {
    last = last_group;
    for (int r = 0; r < kLanes; r++)
      for (int i = 0; i <= last; i += 32 / kGroup) {
        Block32 block;
        expand(strip.row[r], (group + i) * kGroup / 32, block);
        std::memcpy(q[r] + i * kGroup, block.q, 32);
        for (int j = 0; j < 32 / kGroup; j++) floats[i + j][r] = block.d[j];
      }
  }
  template <bool kFull>
  DASLLAMA_INLINE void unpack(int r, Ints* w) const {
    for (int part = 0; part < kParts; part++)
      w[part] = bit_xor(load_units(q[r] + 16 * part, kGroup), splat_bytes(kFlip));
  }
  DASLLAMA_INLINE void scales(int i, Floats& d, Floats&) const { d = load_floats(floats[i]); }
};

template <class T>
struct Packed256 : T {
  typedef Nothing Expand;
  const Strip& strip;
  int64_t at = 0;

  Packed256(const Strip& strip, Nothing) : strip(strip) {}
  DASLLAMA_INLINE void begin(int64_t block) { at = block * T::kBytes; }
  DASLLAMA_INLINE void unpack(int r, int step, Ints* w) const {
    if (step == 0) strip.prefetch(r, at, T::kBytes);
    T::unpack(strip.row[r] + at, step, w);
  }
  DASLLAMA_INLINE void scales(typename T::Scales& out) const { T::scales(strip.row[0] + at, strip.offset, out); }
};

template <bool kHasMin>
struct Expanded256 : SuperLayout<16, 1, kHasMin> {
  typedef Expand256 Expand;
  typedef SuperLayout<16, 1, kHasMin> Layout;
  static constexpr int kMax = 128, kBias = kSignedBias;
  static constexpr int group(int step, int, int i) { return step * kUnits + i; }
  const Strip& strip;
  Expand256 expand;
  alignas(64) uint8_t q[kLanes][256];
  alignas(64) float d[2][kLanes];
  alignas(64) int32_t scale[16][kLanes];
  alignas(64) int16_t mins[8][kLanes][2];

  Expanded256(const Strip& strip, Expand256 expand) : strip(strip), expand(expand) {}
  void begin(int64_t b) {
    for (int r = 0; r < kLanes; r++) {
      Block256 block;
      expand(strip.row[r], b, block);
      std::memcpy(q[r], block.q, 256);
      d[0][r] = block.d;
      d[1][r] = kHasMin ? block.dmin : 0;
      for (int g = 0; g < 16; g++) {
        scale[g][r] = block.scale[g];
        if (kHasMin) mins[g / 2][r][g % 2] = block.min[g];
      }
    }
  }
  DASLLAMA_INLINE void unpack(int r, int step, Ints* w) const {
    w[0] = bit_xor(load_ints(q[r] + 16 * kUnits * step), splat_bytes(kFlip));
  }
  DASLLAMA_INLINE void scales(typename Layout::Scales& out) const {
    out.d = load_floats(d[0]);
    out.dmin = load_floats(d[1]);
    for (int g = 0; g < 16; g++) out.scale[g] = load_ints(scale[g]);
    if (kHasMin)
      for (int p = 0; p < 8; p++) out.mins[p] = load_ints(mins[p]);
  }
};

}  // namespace int_dot
}  // namespace
}  // namespace dasllama
