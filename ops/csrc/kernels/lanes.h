// Sixteen f32 lanes in GCC/Clang vector extensions: the compiler maps them to SSE, AVX2 or AVX-512 registers.
//
// Sums always run over the same 16 lanes and end in the same tree, and products are never contracted
// (-ffp-contract=off), so every instruction set gives the same bits.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

#define DASLLAMA_INLINE inline __attribute__((always_inline))
#define DASLLAMA_NOINLINE __attribute__((noinline))

typedef float f32x16 __attribute__((vector_size(64), aligned(4), may_alias));

DASLLAMA_INLINE f32x16 load16(const float* p) { return *reinterpret_cast<const f32x16*>(p); }
DASLLAMA_INLINE void store16(float* p, f32x16 v) { *reinterpret_cast<f32x16*>(p) = v; }

// The fixed tree: lane i with i+8, then i+4, i+2, i+1.
DASLLAMA_INLINE float sum16(f32x16 v) {
  float t[16];
  std::memcpy(t, &v, sizeof t);
  for (int w = 8; w; w /= 2)
    for (int i = 0; i < w; i++) t[i] += t[i + w];
  return t[0];
}

}  // namespace
