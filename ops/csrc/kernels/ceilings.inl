// What one core can do at most, for comparison: nothing of use is computed.

// Reads n bytes, a multiple of 8 registers, once: 8 independent sums, and each line asked for 8 KiB ahead.
static int64_t read_ceiling(const uint8_t* p, int64_t n) {
  constexpr int64_t kRegister = sizeof(ivec);
  ivec sums[8] = {};
  for (int64_t i = 0; i < n; i += 8 * kRegister)
    for (int64_t j = 0; j < 8; j++) {
      const uint8_t* at = p + i + kRegister * j;
      __builtin_prefetch(at + 8192);
      sums[j] += *reinterpret_cast<const ivec*>(at);
    }
  for (int j = 1; j < 8; j++) sums[0] += sums[j];
  return sums[0][0];
}

// The empty asm keeps the compiler from leaving a step out.
#if defined(DASLLAMA_ISA_AVX2)
#define DASLLAMA_KEEP(v) asm volatile("" : "+v"(v))
#elif defined(__aarch64__)
#define DASLLAMA_KEEP(v) asm volatile("" : "+w"(v))
#elif defined(__x86_64__)
#define DASLLAMA_KEEP(v) asm volatile("" : "+x"(v))
#else
#define DASLLAMA_KEEP(v) asm volatile("" : "+m"(v))
#endif

// Twelve independent chains hide the latency. Both return the multiply-adds done in n steps.
static int64_t fma_ceiling(int64_t n) {
  fvec sums[12] = {};
  const fvec half = splat<fvec>(0.5f);
  for (int64_t i = 0; i < n; i++)
#pragma GCC unroll 12
    for (int j = 0; j < 12; j++) {
      sums[j] = fma(sums[j], half, half);
      DASLLAMA_KEEP(sums[j]);
    }
  return 12 * kWidth * n;
}

// Bytes times bytes into int32. On AVX2 every two products are widened, as they must be for bytes of any size; kernels for
// weights of few bits widen later, and may come out above this.
static int64_t dot_ceiling(int64_t n) {
  ivec sums[12] = {};
  ivec ones = (ivec)(0x01010101 - ivec{});
  for (int64_t i = 0; i < n; i++)
#pragma GCC unroll 12
    for (int j = 0; j < 12; j++) {
      ivec bytes = ones;
      DASLLAMA_KEEP(bytes);
#if defined(DASLLAMA_ISA_AVX512)
      sums[j] = (ivec)_mm512_dpbusd_epi32((__m512i)sums[j], (__m512i)bytes, (__m512i)ones);
#elif defined(DASLLAMA_ISA_AVX2)
      const __m256i pairs = _mm256_maddubs_epi16((__m256i)bytes, (__m256i)ones);
      sums[j] += (ivec)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#elif defined(DASLLAMA_ISA_NEON)
      sums[j] = (ivec)vdotq_s32((int32x4_t)sums[j], (int8x16_t)bytes, (int8x16_t)ones);
#else
      sums[j] += bytes * ones;  // one product a lane
#endif
      DASLLAMA_KEEP(sums[j]);
    }
#if defined(DASLLAMA_ISA_AVX2) || defined(DASLLAMA_ISA_NEON)
  return 12 * static_cast<int64_t>(sizeof(ivec)) * n;
#else
  return 12 * kWidth * n;
#endif
}
