// Sixteen f32 lanes with fused multiply-add, in the widest registers of the instruction set that is being compiled.
//
// A fused multiply-add rounds once, so the libm call of the plain build, FMA3 and AVX-512 give the same bits. GCC splits
// its 64-byte vector type badly where registers have 32 bytes; therefore a struct of what the machine has.
#pragma once
#include "../half.h"
#include "lanes.h"

#if defined(DASLLAMA_ISA_AVX512) || defined(DASLLAMA_ISA_AVX2)
#include <immintrin.h>
#endif

namespace {

typedef float f32x4 __attribute__((vector_size(16), aligned(4), may_alias));

// A weight element as it lies in the file.
struct Half {
  uint16_t bits;
};
struct Bfloat {
  uint16_t bits;
};

#if defined(DASLLAMA_ISA_AVX512)

struct Lanes {
  __m512 v;
};

DASLLAMA_INLINE Lanes zero_lanes() { return {_mm512_setzero_ps()}; }
DASLLAMA_INLINE Lanes splat_lanes(float f) { return {_mm512_set1_ps(f)}; }
DASLLAMA_INLINE Lanes load_lanes(const float* p) { return {_mm512_loadu_ps(p)}; }
DASLLAMA_INLINE Lanes load_lanes(const Half* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
DASLLAMA_INLINE Lanes load_lanes(const Bfloat* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
DASLLAMA_INLINE Lanes round_to_half(Lanes a) {
  return {_mm512_cvtph_ps(_mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))};
}
DASLLAMA_INLINE void store_lanes(float* p, Lanes a) { _mm512_storeu_ps(p, a.v); }
DASLLAMA_INLINE Lanes fma_lanes(Lanes a, Lanes b, Lanes c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }

#elif defined(DASLLAMA_ISA_AVX2)

struct Lanes {
  __m256 lo, hi;
};

DASLLAMA_INLINE __m256 load_eight(const Half* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
DASLLAMA_INLINE __m256 load_eight(const Bfloat* p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
DASLLAMA_INLINE __m256 load_eight(const float* p) { return _mm256_loadu_ps(p); }

DASLLAMA_INLINE Lanes zero_lanes() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
DASLLAMA_INLINE Lanes splat_lanes(float f) { return {_mm256_set1_ps(f), _mm256_set1_ps(f)}; }
template <class W>
DASLLAMA_INLINE Lanes load_lanes(const W* p) {
  return {load_eight(p), load_eight(p + 8)};
}
DASLLAMA_INLINE __m256 round_eight(__m256 a) {
  return _mm256_cvtph_ps(_mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
DASLLAMA_INLINE Lanes round_to_half(Lanes a) { return {round_eight(a.lo), round_eight(a.hi)}; }
DASLLAMA_INLINE void store_lanes(float* p, Lanes a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
DASLLAMA_INLINE Lanes fma_lanes(Lanes a, Lanes b, Lanes c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}

#else

struct Lanes {
  float v[16];
};

DASLLAMA_INLINE float widen(float f) { return f; }
DASLLAMA_INLINE float widen(Half h) { return dasllama::f16_to_f32(h.bits); }
DASLLAMA_INLINE float widen(Bfloat b) { return dasllama::bf16_to_f32(b.bits); }

DASLLAMA_INLINE Lanes splat_lanes(float f) {
  Lanes a;
  for (int i = 0; i < 16; i++) a.v[i] = f;
  return a;
}
DASLLAMA_INLINE Lanes zero_lanes() { return splat_lanes(0.0f); }
template <class W>
DASLLAMA_INLINE Lanes load_lanes(const W* p) {
  W raw[16];  // a row of bytes need not be aligned
  std::memcpy(raw, p, sizeof raw);
  Lanes a;
  for (int i = 0; i < 16; i++) a.v[i] = widen(raw[i]);
  return a;
}
DASLLAMA_INLINE Lanes round_to_half(Lanes a) {
  for (float& v : a.v) v = dasllama::f16_to_f32(dasllama::f32_to_f16(v));
  return a;
}
DASLLAMA_INLINE void store_lanes(float* p, Lanes a) { std::memcpy(p, a.v, sizeof a.v); }
DASLLAMA_INLINE Lanes fma_lanes(Lanes a, Lanes b, Lanes c) {
  for (int i = 0; i < 16; i++) c.v[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]);
  return c;
}

#endif

#if defined(__clang__)
#define DASLLAMA_SHUFFLE4(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int i32x4 __attribute__((vector_size(16)));
#define DASLLAMA_SHUFFLE4(a, b, ...) __builtin_shuffle(a, b, (i32x4{__VA_ARGS__}))
#endif

// lanes.h's sum16 of two accumulators that lie one after the other: the same tree, both at once.
DASLLAMA_INLINE void sum16_pair(const float* lanes, float* first, float* second) {
  const f32x4* v = reinterpret_cast<const f32x4*>(lanes);
  const f32x4 a = (v[0] + v[2]) + (v[1] + v[3]), b = (v[4] + v[6]) + (v[5] + v[7]);
  const f32x4 t = DASLLAMA_SHUFFLE4(a, b, 0, 1, 4, 5) + DASLLAMA_SHUFFLE4(a, b, 2, 3, 6, 7);
  const f32x4 s = t + DASLLAMA_SHUFFLE4(t, t, 1, 0, 3, 2);
  *first = s[0];
  *second = s[2];
}

}  // namespace
