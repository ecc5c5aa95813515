// What a tile of the integer matmul is where sums of products have 32 bits from the start: AVX-512 VNNI, NEON. AVX2, which
// sums in 16 bits first, has its own of all this (simd_avx2.h).
#pragma once

namespace dasllama {
namespace {
namespace int_dot {

// How much the largest weight matters to a tile: not at all, sums have 32 bits.
constexpr int tile_max(int) { return 0; }
constexpr int tile_planes(int) { return 1; }
constexpr int tile_bias(int, int bias) { return bias; }

// Four weights of each lane to their place in a panel.
template <int kMax>
DASLLAMA_INLINE void store_weights(uint8_t* p, Ints w) {
  store_ints(p, w);
}

// A group's scale as a tile wants it.
DASLLAMA_INLINE Ints tile_scale(Ints scale) { return scale; }
// Adds to sum the products of kGroup elements, taken back to weights without bias, times the scales.
template <int kMax, int kGroup, bool kBiased, int MR, int NR>
DASLLAMA_INLINE void tile_scaled_dots(const uint8_t* const* panel, const int8_t* const* x, const int32_t* const* init,
                                      const Ints (&scale)[NR], Ints (&sum)[MR][NR]) {
  Ints dots[MR][NR];
#pragma GCC unroll 8
  for (int m = 0; m < MR; m++)
#pragma GCC unroll 4
    for (int n = 0; n < NR; n++) dots[m][n] = kBiased ? splat_ints(*init[m]) : zero_ints();
  tile_dots<kMax, kGroup, MR, NR>(panel, x, dots);
#pragma GCC unroll 8
  for (int m = 0; m < MR; m++)
#pragma GCC unroll 4
    for (int n = 0; n < NR; n++) sum[m][n] = add(sum[m][n], mul(dots[m][n], scale[n]));
}
template <int kBias, int kGroups>
DASLLAMA_INLINE Ints unbias(Ints sum, const Ints*, const int16_t*) {
  return sum;
}

}  // namespace int_dot
}  // namespace
}  // namespace dasllama
