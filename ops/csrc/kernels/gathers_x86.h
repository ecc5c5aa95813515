// Bytes of kLanes rows as ints with a lane per row, and points of a grid, for both widths of vectors of x86. Plain loads
// and shuffles: on many processors a gather takes longer than as many loads.
#pragma once

namespace dasllama {
namespace {
namespace int_dot {

struct Offsets {  // of kLanes rows from the first of them; general registers address memory
  int64_t of[kLanes];
};
DASLLAMA_INLINE Offsets load_offsets(const int32_t* p) {
  Offsets offset;
  for (int r = 0; r < kLanes; r++) offset.of[r] = p[r];
  return offset;
}

// unit(r), unit(r + 4), ...: a unit for every four rows.
template <class F>
DASLLAMA_INLINE Ints unit_of_four(int r, const F& unit) {
  Unit units[kUnits];
#pragma GCC unroll 4
  for (int i = 0; i < kUnits; i++) units[i] = unit(r + 4 * i);
  return join_units(units);
}

// Four, eight or sixteen bytes of each row.
DASLLAMA_INLINE Ints gather_lanes(const uint8_t* base, const Offsets& offset) {
  const auto row = [&](int r) __attribute__((always_inline)) {
    return _mm_cvtsi32_si128(static_cast<int>(load_u32(base + offset.of[r])));
  };
  return unit_of_four(0, [&](int r) __attribute__((always_inline)) {
    return _mm_unpacklo_epi64(_mm_unpacklo_epi32(row(r), row(r + 1)), _mm_unpacklo_epi32(row(r + 2), row(r + 3)));
  });
}
DASLLAMA_INLINE void gather_lanes(const uint8_t* base, const Offsets& offset, Ints (&out)[2]) {
  const auto row = [&](int r) __attribute__((always_inline)) {
    return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(base + offset.of[r]));
  };
  const auto two = [&](int r) __attribute__((always_inline)) { return _mm_unpacklo_epi64(row(r), row(r + 1)); };
  deal_lanes(unit_of_four(0, two), unit_of_four(2, two), out);
}
DASLLAMA_INLINE void gather_lanes(const uint8_t* base, const Offsets& offset, Ints (&out)[4]) {
  const auto row = [&](int r) __attribute__((always_inline)) { return load_unit(base + offset.of[r]); };
#pragma GCC unroll 4
  for (int r = 0; r < 4; r++) out[r] = unit_of_four(r, row);
  transpose_quad(out);
}

// Points of four bytes, one for each index.
DASLLAMA_INLINE Ints points(const int8_t (*grid)[4], const uint16_t* index) {
  return unit_of_four(0, [&](int first) __attribute__((always_inline)) {
    uint64_t at;
    std::memcpy(&at, index + first, 8);
    const auto point = [&](int i) __attribute__((always_inline)) {
      int32_t bytes;
      std::memcpy(&bytes, grid[at >> 16 * i & 0xffff], 4);
      return _mm_cvtsi32_si128(bytes);
    };
    return _mm_unpacklo_epi64(_mm_unpacklo_epi32(point(0), point(1)), _mm_unpacklo_epi32(point(2), point(3)));
  });
}

}  // namespace int_dot
}  // namespace
}  // namespace dasllama
