// Where the vector matmul gets a strip of weights from: Packed32 and Packed256 unpack the file's rows piece by piece into
// registers; Decoded32 and Decoded256 are for types that are better taken apart in one go, row after row, into bytes in the
// order of the elements.
//
// All of them offer, for a strip of kLanes rows (rows beyond the last are that one again):
//   begin(at, last)   take up groups at .. at + last (of 32 or 16 elements), or the block `at` of 256
//   unpack(r, ...)    weights of row r, as blocks_simd.h describes
//   d(i), m(i) or scales()   scales of the strip
#pragma once
#include "blocks_simd_decoded.h"

namespace dasllama {
namespace {
namespace int_dot {

constexpr int64_t kNear = 24 << 10, kFar = kLanes * 16 << 10;  // bytes: what first-level and second-level caches surely keep

DASLLAMA_INLINE void prefetch_lines(const uint8_t* from, int bytes) {
#pragma GCC unroll 8
  for (int i = 0; i < bytes; i += 64) __builtin_prefetch(from + i);
}

struct Strip {
  const uint8_t* row[kLanes];
  Offsets offset;  // of each row from the first
  int64_t row_bytes;
  int64_t ahead, along;  // row[0] + ahead is asked for first; along: bytes further for each byte of a row that is read

  Strip(const uint8_t* w, int64_t row_bytes, int64_t first, int64_t N) : row_bytes(row_bytes) {
    alignas(64) int32_t offsets[kLanes];
    for (int r = 0; r < kLanes; r++) {
      const int64_t n = first + r < N ? first + r : N - 1;
      row[r] = w + n * row_bytes;
      offsets[r] = static_cast<int32_t>((n - first) * row_bytes);
    }
    offset = load_offsets(offsets);
    // The strip below follows this one in memory. Asked for from its first byte to its last, however the rows of this
    // one are read, it is a single stream to the processor's own prefetch, which kLanes short rows never wake; but it
    // must stay near until then. Of long rows, each is a stream, further on in itself or below.
    const int64_t strip = row_bytes * kLanes;
    along = strip <= kNear ? kLanes : 1;
    ahead = strip <= kFar ? strip : kFar / kLanes;
  }

  // Asks for as many bytes of what will be wanted as are read now, `bytes` of row r at `at`.
  DASLLAMA_INLINE void prefetch(int r, int64_t at, int bytes) const {
    prefetch_lines(row[0] + ahead + along * at + r * (along > 1 ? bytes : row_bytes), bytes);
  }
};

template <class T>
struct Packed32 : T {
  typedef T Type;
  static constexpr int kBlock = 32, kParts = 2;
  const Strip& strip;
  int64_t at = 0;
  int last = 0;

  explicit Packed32(const Strip& strip) : strip(strip) {}
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

// kUnits groups of kParts units each: part by part, a group's parts in the same unit.
template <int kParts>
DASLLAMA_INLINE void take_parts(const uint8_t* q, Ints* w) {
  w[0] = load_ints(q);
  if constexpr (kParts == 2) deal_units(w[0], load_ints(q + 16 * kUnits), w);
}

template <class T>
struct Decoded32 : T {
  typedef T Type;
  static constexpr int kBlock = 32, kGroup = 16 * T::kParts;
  static constexpr bool kAdd = false;
  const Strip& strip;
  int64_t k = 0;
  alignas(64) uint8_t q[kLanes][kUnits * kGroup] = {};

  explicit Decoded32(const Strip& strip) : strip(strip) {}
  DASLLAMA_INLINE void begin(int64_t group, int last_group) {
    k = group * kGroup;
    for (int r = 0; r < kLanes; r++) {
      strip.prefetch(r, T::at(k), kUnits * kGroup * T::kBytes / T::kSpan);
      T::decode(strip.row[r], k, (last_group + 1) * kGroup, q[r]);
    }
  }
  template <bool kFull>
  DASLLAMA_INLINE void unpack(int r, Ints* w) const {
    take_parts<T::kParts>(q[r], w);
  }
  DASLLAMA_INLINE void scales(int i, Floats& d, Floats&) const { d = T::d(strip.row[0], k + i * kGroup, strip.offset); }
};

// Where a source of blocks of 256 stands, and what all of them say of it.
template <class T>
struct Source256 : T {
  typedef T Type;
  const Strip& strip;
  int64_t at = 0;

  explicit Source256(const Strip& strip) : strip(strip) {}
  DASLLAMA_INLINE void scales(typename T::Scales& out) const { T::scales(strip.row[0] + at, strip.offset, out); }
};

template <class T>
struct Packed256 : Source256<T> {
  using Source256<T>::Source256, Source256<T>::strip, Source256<T>::at;
  DASLLAMA_INLINE void begin(int64_t block) { at = block * T::kBytes; }
  DASLLAMA_INLINE void unpack(int r, int step, Ints* w) const {
    if (step == 0) strip.prefetch(r, at, T::kBytes);
    T::unpack(strip.row[r] + at, step, w);
  }
};

template <class T>
struct Decoded256 : Source256<T> {
  using Source256<T>::Source256, Source256<T>::strip, Source256<T>::at;
  alignas(64) uint8_t q[kLanes][256];

  DASLLAMA_INLINE void begin(int64_t block) {
    at = block * T::kBytes;
    for (int r = 0; r < kLanes; r++) {
      strip.prefetch(r, at, T::kBytes);
      T::decode(strip.row[r] + at, q[r]);
    }
  }
  DASLLAMA_INLINE void unpack(int r, int step, Ints* w) const {
    take_parts<T::kParts>(q[r] + 16 * kUnits * T::kParts * step, w);
  }
};

}  // namespace int_dot
}  // namespace
}  // namespace dasllama
