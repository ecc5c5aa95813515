// Sixteen f32 lanes in the widest registers of the instruction set that is being compiled: one of AVX-512, two of AVX2,
// four of SSE2 or NEON. GCC splits a 64-byte vector type through memory where registers are smaller, hence `Two`.
//
// Sums always run over the same 16 lanes and end in the same tree, products are never contracted (-ffp-contract=off),
// and a fused multiply-add (`fma`) rounds once whether it is an instruction or libm's fmaf: every instruction set gives
// the same bits.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../half.h"

#if defined(DASLLAMA_ISA_AVX2)
#include <immintrin.h>
#elif defined(DASLLAMA_ISA_NEON)
#include <arm_neon.h>
#endif

namespace {

#define DASLLAMA_INLINE inline __attribute__((always_inline))
#define DASLLAMA_NOINLINE __attribute__((noinline))

#if defined(DASLLAMA_ISA_AVX512)
constexpr int kWidth = 16, kRegisters = 32;  // f32 lanes of one register, and how many of these there are
#elif defined(DASLLAMA_ISA_AVX2)
constexpr int kWidth = 8, kRegisters = 16;
#elif defined(DASLLAMA_ISA_NEON)
constexpr int kWidth = 4, kRegisters = 32;
#else
constexpr int kWidth = 4, kRegisters = 16;
#endif

typedef float fvec __attribute__((vector_size(4 * kWidth)));    // one register
typedef int32_t ivec __attribute__((vector_size(4 * kWidth)));  // integers, or a mask: -1 or 0 in each lane
typedef float unaligned_fvec __attribute__((vector_size(4 * kWidth), aligned(1), may_alias));

template <class V>
struct Two {
  V lo, hi;
};

#if defined(DASLLAMA_ISA_AVX512)
typedef fvec f32x16;
typedef ivec i32x16;
#elif defined(DASLLAMA_ISA_AVX2)
typedef Two<fvec> f32x16;
typedef Two<ivec> i32x16;
#else
typedef Two<Two<fvec>> f32x16;
typedef Two<Two<ivec>> i32x16;
#endif

// An IEEE half and a bfloat16 as they lie in memory.
struct f16 {
  uint16_t bits;
};
struct bf16 {
  uint16_t bits;
};
// Two codes of 4 bits, which stand for -8 to 7.
struct nibble_pair {
  uint8_t bits;
};

// ---- arithmetic of Two: the halves' arithmetic ----------------------------------------------------------------------

#define DASLLAMA_TWO(op)                                   \
  template <class V>                                       \
  DASLLAMA_INLINE Two<V> operator op(Two<V> a, Two<V> b) { \
    return {a.lo op b.lo, a.hi op b.hi};                   \
  }
DASLLAMA_TWO(+)
DASLLAMA_TWO(-)
DASLLAMA_TWO(*)
DASLLAMA_TWO(/)
DASLLAMA_TWO(&)
#undef DASLLAMA_TWO

template <class V>
DASLLAMA_INLINE Two<V> operator*(Two<V> a, float b) {
  return {a.lo * b, a.hi * b};
}
template <class V>
DASLLAMA_INLINE Two<V>& operator+=(Two<V>& a, Two<V> b) {
  return a = a + b;
}

// ---- one register ---------------------------------------------------------------------------------------------------

// a * b + c, rounded once.
DASLLAMA_INLINE fvec fma(fvec a, fvec b, fvec c) {
#if defined(DASLLAMA_ISA_AVX512)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(DASLLAMA_ISA_AVX2)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(DASLLAMA_ISA_NEON)
  return vfmaq_f32(c, a, b);
#else
  for (int i = 0; i < kWidth; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#endif
}

DASLLAMA_INLINE fvec select(ivec mask, fvec a, fvec b) { return mask ? a : b; }
DASLLAMA_INLINE ivec less(fvec a, fvec b) { return a < b; }
DASLLAMA_INLINE ivec at_most(fvec a, fvec b) { return a <= b; }

DASLLAMA_INLINE fvec load_one(const float* p) { return *reinterpret_cast<const unaligned_fvec*>(p); }
DASLLAMA_INLINE void store_one(float* p, fvec v) { *reinterpret_cast<unaligned_fvec*>(p) = v; }

DASLLAMA_INLINE fvec load_one(const f16* p) {
#if defined(DASLLAMA_ISA_AVX512)
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(DASLLAMA_ISA_AVX2)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(DASLLAMA_ISA_NEON)
  return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(reinterpret_cast<const uint8_t*>(p))));
#else
  f16 h[kWidth];  // p need not be aligned
  std::memcpy(h, p, sizeof h);
  fvec v;
  for (int i = 0; i < kWidth; i++) v[i] = dasllama::f16_to_f32(h[i].bits);
  return v;
#endif
}

DASLLAMA_INLINE fvec load_one(const bf16* p) {
#if defined(DASLLAMA_ISA_AVX512)
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
#elif defined(DASLLAMA_ISA_AVX2)
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
#elif defined(DASLLAMA_ISA_NEON)
  return (fvec)vshll_n_u16(vreinterpret_u16_u8(vld1_u8(reinterpret_cast<const uint8_t*>(p))), 16);
#else
  bf16 b[kWidth];
  std::memcpy(b, p, sizeof b);
  fvec v;
  for (int i = 0; i < kWidth; i++) v[i] = dasllama::bf16_to_f32(b[i].bits);
  return v;
#endif
}

DASLLAMA_INLINE fvec load_one(const int8_t* p) {
#if defined(DASLLAMA_ISA_AVX512)
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(DASLLAMA_ISA_AVX2)
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#elif defined(DASLLAMA_ISA_NEON)
  int32_t four;
  std::memcpy(&four, p, 4);
  const int16x8_t wide = vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four)));
  return vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
#else
  fvec v;
  for (int i = 0; i < kWidth; i++) v[i] = p[i];
  return v;
#endif
}

// kWidth bytes: their lower codes and their upper ones.
DASLLAMA_INLINE void load_nibbles(const nibble_pair* p, fvec& low, fvec& high) {
#if defined(DASLLAMA_ISA_AVX512)
  const __m512 values = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
  const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  low = _mm512_permutexvar_ps(bytes, values);  // takes the lower four bits of an index
  high = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), values);
#elif defined(DASLLAMA_ISA_AVX2)
  const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  const __m256i eight = _mm256_set1_epi32(8);
  low = _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_and_si256(bytes, _mm256_set1_epi32(15)), eight));
  high = _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_srli_epi32(bytes, 4), eight));
#else
  int8_t q[2][kWidth];
  for (int i = 0; i < kWidth; i++) {
    q[0][i] = static_cast<int8_t>((p[i].bits & 15) - 8);
    q[1][i] = static_cast<int8_t>((p[i].bits >> 4) - 8);
  }
  low = load_one(q[0]);
  high = load_one(q[1]);
#endif
}

DASLLAMA_INLINE void store_one(f16* p, fvec v) {
#if defined(DASLLAMA_ISA_AVX512)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(DASLLAMA_ISA_AVX2)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(DASLLAMA_ISA_NEON)
  vst1_u8(reinterpret_cast<uint8_t*>(p), vreinterpret_u8_f16(vcvt_f16_f32(v)));
#else
  for (int i = 0; i < kWidth; i++) p[i].bits = dasllama::f32_to_f16(v[i]);
#endif
}

// ---- sixteen lanes out of registers ---------------------------------------------------------------------------------

template <class V>
DASLLAMA_INLINE Two<V> fma(Two<V> a, Two<V> b, Two<V> c) {
  return {fma(a.lo, b.lo, c.lo), fma(a.hi, b.hi, c.hi)};
}
template <class M, class V>
DASLLAMA_INLINE Two<V> select(Two<M> mask, Two<V> a, Two<V> b) {
  return {select(mask.lo, a.lo, b.lo), select(mask.hi, a.hi, b.hi)};
}
template <class V>
DASLLAMA_INLINE auto less(Two<V> a, Two<V> b) -> Two<decltype(less(a.lo, b.lo))> {
  return {less(a.lo, b.lo), less(a.hi, b.hi)};
}
template <class V>
DASLLAMA_INLINE auto at_most(Two<V> a, Two<V> b) -> Two<decltype(at_most(a.lo, b.lo))> {
  return {at_most(a.lo, b.lo), at_most(a.hi, b.hi)};
}

// V from memory: sizeof(V) / 4 elements of f32, f16 or bf16, which need not be aligned.
template <class V, class T>
DASLLAMA_INLINE V load(const T* p) {
  if constexpr (std::is_same_v<V, fvec>) {
    return load_one(p);
  } else {
    using H = decltype(V::lo);
    return {load<H>(p), load<H>(p + sizeof(H) / 4)};
  }
}
template <class V>
DASLLAMA_INLINE V splat(float f) {
  if constexpr (std::is_same_v<V, fvec>)
    return f - fvec{};
  else
    return {splat<decltype(V::lo)>(f), splat<decltype(V::lo)>(f)};
}
// V from sizeof(V) / sizeof(fvec) registers.
template <class V>
DASLLAMA_INLINE V join(const fvec* registers) {
  if constexpr (std::is_same_v<V, fvec>) {
    return *registers;
  } else {
    using H = decltype(V::lo);
    return {join<H>(registers), join<H>(registers + sizeof(H) / sizeof(fvec))};
  }
}
template <class T>
DASLLAMA_INLINE void store(T* p, fvec v) {
  store_one(p, v);
}
template <class T, class V>
DASLLAMA_INLINE void store(T* p, Two<V> v) {
  store(p, v.lo);
  store(p + sizeof(V) / 4, v.hi);
}

template <class T>
DASLLAMA_INLINE f32x16 load16(const T* p) {
  return load<f32x16>(p);
}
template <class T>
DASLLAMA_INLINE void store16(T* p, f32x16 v) {
  store(p, v);
}
// The first n < 16 elements and zeros after them; nothing past the n-th is touched.
template <class T>
DASLLAMA_INLINE f32x16 load16(const T* p, int64_t n) {
  T padded[16] = {};
  std::memcpy(padded, p, static_cast<size_t>(n) * sizeof(T));
  return load16(padded);
}
template <class T>
DASLLAMA_INLINE void store16(T* p, f32x16 v, int64_t n) {
  T padded[16];
  store16(padded, v);
  std::memcpy(p, padded, static_cast<size_t>(n) * sizeof(T));
}
template <class V>
DASLLAMA_INLINE void load_nibbles(const nibble_pair* p, Two<V>& low, Two<V>& high) {
  load_nibbles(p, low.lo, high.lo);
  load_nibbles(p + sizeof(V) / 4, low.hi, high.hi);
}
DASLLAMA_INLINE f32x16 splat16(float f) { return splat<f32x16>(f); }
DASLLAMA_INLINE f32x16 max(f32x16 a, f32x16 b) { return select(less(a, b), b, a); }

// Bit i is set where lane i of a mask is.
DASLLAMA_INLINE uint32_t bits_of(ivec mask) {
#if defined(DASLLAMA_ISA_AVX512)
  return _mm512_movepi32_mask((__m512i)mask);
#elif defined(DASLLAMA_ISA_AVX2)
  return static_cast<uint32_t>(_mm256_movemask_ps((__m256)mask));
#else
  return static_cast<uint32_t>((mask[0] & 1) | (mask[1] & 2) | (mask[2] & 4) | (mask[3] & 8));
#endif
}
template <class M>
DASLLAMA_INLINE uint32_t bits_of(Two<M> mask) {
  return bits_of(mask.lo) | bits_of(mask.hi) << sizeof(M) / 4;
}

#if defined(DASLLAMA_ISA_AVX2) && !defined(DASLLAMA_ISA_AVX512)
// Lanes that are set in each number of 8 bits, lowest first.
struct SetLanes {
  uint8_t lanes[256][8] = {};
  constexpr SetLanes() {
    for (int bits = 0; bits < 256; bits++)
      for (uint8_t lane = 0, n = 0; lane < 8; lane++)
        if (bits >> lane & 1) lanes[bits][n++] = lane;
  }
};
constexpr SetLanes kSetLanes;
#endif

// The lanes of v that are set in the mask, in their order, to p, where 16 elements may be written. Returns their number.
DASLLAMA_INLINE int64_t compress(float* p, fvec v, ivec mask) {
  const uint32_t bits = bits_of(mask);
#if defined(DASLLAMA_ISA_AVX512)
  store_one(p, _mm512_maskz_compress_ps(static_cast<__mmask16>(bits), v));
#elif defined(DASLLAMA_ISA_AVX2)
  const __m128i lanes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(kSetLanes.lanes[bits]));
  store_one(p, _mm256_permutevar8x32_ps(v, _mm256_cvtepu8_epi32(lanes)));
#else
  for (int i = 0, n = 0; i < kWidth; i++) {
    p[n] = v[i];
    n += bits >> i & 1;
  }
#endif
  return __builtin_popcount(bits);
}
template <class V, class M>
DASLLAMA_INLINE int64_t compress(float* p, Two<V> v, Two<M> mask) {
  const int64_t n = compress(p, v.lo, mask.lo);
  return n + compress(p + n, v.hi, mask.hi);
}

// ---- folding sixteen lanes ------------------------------------------------------------------------------------------

// The fixed tree of a symmetric operation: lane i with i+8, then i+4, i+2, i+1.
template <class Op>
DASLLAMA_INLINE float fold16(f32x16 v, const Op& op) {
#if defined(DASLLAMA_ISA_AVX2)
#if defined(DASLLAMA_ISA_AVX512)
  const __m256 eight = op(_mm512_castps512_ps256(v), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1)));
#else
  const __m256 eight = op(v.lo, v.hi);
#endif
  const __m128 four = op(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
#else
  const fvec four = op(op(v.lo.lo, v.hi.lo), op(v.lo.hi, v.hi.hi));
#endif
  return op(op(four[0], four[2]), op(four[1], four[3]));
}

DASLLAMA_INLINE float sum16(f32x16 v) {
  return fold16(v, [](auto a, auto b) { return a + b; });
}
DASLLAMA_INLINE float max16(f32x16 v) {
  return fold16(v, [](auto a, auto b) { return a < b ? b : a; });
}

// sum16 of four at once.
DASLLAMA_INLINE void sum16(f32x16 a, f32x16 b, f32x16 c, f32x16 d, float* sums) {
#if defined(DASLLAMA_ISA_AVX2)
#if defined(DASLLAMA_ISA_AVX512)
  const auto half = [](__m512 v) {
    return _mm512_castps512_ps256(v) + _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1));
  };
#else
  const auto half = [](f32x16 v) { return v.lo + v.hi; };
#endif
  const __m256 a8 = half(a), b8 = half(b), c8 = half(c), d8 = half(d);
  const __m256 ab = _mm256_permute2f128_ps(a8, b8, 0x20) + _mm256_permute2f128_ps(a8, b8, 0x31);  // a a a a b b b b
  const __m256 cd = _mm256_permute2f128_ps(c8, d8, 0x20) + _mm256_permute2f128_ps(c8, d8, 0x31);
  const __m256 acbd = _mm256_shuffle_ps(ab, cd, 0x44) + _mm256_shuffle_ps(ab, cd, 0xee);  // a a c c b b d d
  const __m256 all = acbd + _mm256_permute_ps(acbd, 0xb1);
  _mm_storeu_ps(sums, _mm_blend_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1), 0b1010));
#elif defined(DASLLAMA_ISA_NEON)
  const auto pairs = [](f32x16 v, f32x16 w) {  // lanes 0 and 1 of what is left of v, then of w
    const Two<fvec> v8 = v.lo + v.hi, w8 = w.lo + w.hi;
    const float64x2_t v4 = (float64x2_t)(v8.lo + v8.hi), w4 = (float64x2_t)(w8.lo + w8.hi);
    return (float32x4_t)vzip1q_f64(v4, w4) + (float32x4_t)vzip2q_f64(v4, w4);
  };
  vst1q_f32(sums, vpaddq_f32(pairs(a, b), pairs(c, d)));
#else
  sums[0] = sum16(a), sums[1] = sum16(b), sums[2] = sum16(c), sums[3] = sum16(d);
#endif
}

#if defined(DASLLAMA_ISA_AVX512)
// sum16 of v[4 * j + i] into sums[i * stride + j], for i < rows <= 4 and j < 4.
DASLLAMA_INLINE void sum16(const f32x16* v, int rows, float* sums, int64_t stride) {
  f32x16 eights[8], fours[4], twos[2];  // lanes left of each vector that was folded
  for (int i = 0; i < 8; i++)
    eights[i] = _mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0x44) + _mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0xee);
  for (int i = 0; i < 4; i++)
    fours[i] = _mm512_shuffle_f32x4(eights[2 * i], eights[2 * i + 1], 0x88) +
               _mm512_shuffle_f32x4(eights[2 * i], eights[2 * i + 1], 0xdd);
  for (int i = 0; i < 2; i++)
    twos[i] = _mm512_shuffle_ps(fours[2 * i], fours[2 * i + 1], 0x44) +
              _mm512_shuffle_ps(fours[2 * i], fours[2 * i + 1], 0xee);
  const f32x16 ones = _mm512_shuffle_ps(twos[0], twos[1], 0x88) + _mm512_shuffle_ps(twos[0], twos[1], 0xdd);
  _mm_storeu_ps(sums, _mm512_castps512_ps128(ones));
  if (rows > 1) _mm_storeu_ps(sums + stride, _mm512_extractf32x4_ps(ones, 1));
  if (rows > 2) _mm_storeu_ps(sums + 2 * stride, _mm512_extractf32x4_ps(ones, 2));
  if (rows > 3) _mm_storeu_ps(sums + 3 * stride, _mm512_extractf32x4_ps(ones, 3));
}
#endif

}  // namespace
