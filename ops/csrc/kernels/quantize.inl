// Floats to blocks: activations on ggml's lattices (rules and layouts in ops/lattices.py) and weights in the simple
// types (ops/quantize.py). Whatever the input, NaN included, each byte is defined and the same on every instruction set,
// but for the sign of the NaN that s is on Q8_1 where d is infinite: x86 and Arm differ.

// The nearest integer of v, halves to even, or 0 if that is not in [-127, 127]. Adding 1.5 * 2^23 leaves the integer in
// the low bits of the sum.
DASLLAMA_INLINE int32_t nearest_int8(float v) {
  const int32_t q = static_cast<int32_t>(as_bits(v + 12582912.0f) - 0x4b400000u);
  return static_cast<uint32_t>(q + 127u) <= 254u ? q : 0;
}

#if defined(DASLLAMA_ISA_AVX2)
// nearest_int8 of 32 products x[i] * inverse.
DASLLAMA_INLINE __m256i nearest_bytes(const float* x, float inverse) {
#if defined(DASLLAMA_ISA_AVX512)
  const auto sixteen = [&](const float* p) __attribute__((always_inline)) {
    const __m512 v = _mm512_mul_ps(_mm512_loadu_ps(p), _mm512_set1_ps(inverse)) + _mm512_set1_ps(12582912.0f);
    const __m512i i = _mm512_sub_epi32(_mm512_castps_si512(v), _mm512_set1_epi32(0x4b400000));
    const __mmask16 fits = _mm512_cmple_epu32_mask(_mm512_add_epi32(i, _mm512_set1_epi32(127)), _mm512_set1_epi32(254));
    return _mm512_maskz_cvtepi32_epi8(fits, i);
  };
  return _mm256_set_m128i(sixteen(x + 16), sixteen(x));
#else
  const auto eight = [&](const float* p) __attribute__((always_inline)) {
    const __m256 v = _mm256_mul_ps(_mm256_loadu_ps(p), _mm256_set1_ps(inverse)) + _mm256_set1_ps(12582912.0f);
    const __m256i i = _mm256_sub_epi32(_mm256_castps_si256(v), _mm256_set1_epi32(0x4b400000));
    const __m256i shifted = _mm256_add_epi32(i, _mm256_set1_epi32(127));
    const __m256i fits = _mm256_cmpeq_epi32(_mm256_min_epu32(shifted, _mm256_set1_epi32(254)), shifted);
    return _mm256_and_si256(i, fits);
  };
  const __m256i low = _mm256_packs_epi32(eight(x), eight(x + 8)), high = _mm256_packs_epi32(eight(x + 16), eight(x + 24));
  return _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
#endif
}
#endif

// What half.h does, by the instructions where there are some. Those keep bits of a NaN that half.h does not keep.
DASLLAMA_INLINE uint16_t round_to_f16(float v) {
#if defined(DASLLAMA_ISA_AVX2)
  if (v == v) return _cvtss_sh(v, _MM_FROUND_TO_NEAREST_INT);
#endif
  return f32_to_f16(v);
}
DASLLAMA_INLINE float widen_f16(uint16_t h) {
#if defined(DASLLAMA_ISA_AVX2)
  if ((h & 0x7fff) <= 0x7c00) return _cvtsh_ss(h);
#endif
  return f16_to_f32(h);
}

// The largest magnitude as bits: an integer comparison puts NaN above all numbers.
template <int n>
DASLLAMA_INLINE uint32_t top_bits(const float* x) {
  int32_t top = 0;
#if defined(DASLLAMA_ISA_AVX2)
  __m256i tops = _mm256_setzero_si256();
  for (int i = 0; i < n; i += 8) {
    const __m256i bits = _mm256_castps_si256(_mm256_loadu_ps(x + i));
    tops = _mm256_max_epi32(tops, _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff)));
  }
  __m128i four = _mm_max_epi32(_mm256_castsi256_si128(tops), _mm256_extracti128_si256(tops, 1));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  top = _mm_cvtsi128_si32(_mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
#else
  for (int i = 0; i < n; i++) {
    const int32_t a = static_cast<int32_t>(as_bits(x[i]) & 0x7fffffff);
    top = a > top ? a : top;
  }
#endif
  return static_cast<uint32_t>(top);
}

// The element whose magnitude is `top`, the first of them if there are several.
template <int n>
DASLLAMA_INLINE float first_of(const float* x, uint32_t top) {
  uint32_t plus = 0, minus = 0;
  for (int i = 0; i < n; i++) {
    plus |= as_bits(x[i]) == top;
    minus |= as_bits(x[i]) == (top | 0x80000000u);
  }
  if (plus && minus) {
    int i = 0;
    while ((as_bits(x[i]) & 0x7fffffff) != top) i++;
    return x[i];
  }
  return as_float(minus ? top | 0x80000000u : top);
}

// q[i] = nearest_int8(x[i] * inverse), and the sums of 16 of them. x and q do not overlap.
template <int n>
DASLLAMA_INLINE void round_all(const float* x, float inverse, int8_t* q, int32_t (&sums)[n / 16]) {
#if defined(DASLLAMA_ISA_AVX2)
  for (int i = 0; i < n; i += 32) {
    const __m256i bytes = nearest_bytes(x + i, inverse);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(q + i), bytes);
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes);
    __m256i sum = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    sum = _mm256_add_epi32(sum, _mm256_shuffle_epi32(sum, 0x4e));
    sum = _mm256_add_epi32(sum, _mm256_shuffle_epi32(sum, 0xb1));
    sums[i / 16] = _mm256_cvtsi256_si32(sum);
    sums[i / 16 + 1] = _mm256_extract_epi32(sum, 4);
  }
#else
  for (int i = 0; i < n; i++) q[i] = static_cast<int8_t>(nearest_int8(x[i] * inverse));
  for (int g = 0; g < n / 16; g++) {
    sums[g] = 0;
    for (int i = 0; i < 16; i++) sums[g] += q[16 * g + i];
  }
#endif
}

// One block of Q8_0 or Q8_1: q and their sums of 16; d is rounded to f16 where it is kept.
struct Lattice32 {
  float d;
  int32_t sums[2];
  uint16_t d_bits() const { return round_to_f16(d); }
  uint16_t s_bits() const { return round_to_f16(d * static_cast<float>(sums[0] + sums[1])); }
};
DASLLAMA_INLINE Lattice32 to_lattice_32(const float* x, int8_t* q) {
  const float top = as_float(top_bits<32>(x));
  Lattice32 block = {top / 127.0f, {}};
  round_all<32>(x, top != 0 ? 127.0f / top : 0.0f, q, block.sums);
  return block;
}

// One block of Q8_K likewise; its d stays f32. The element of largest magnitude becomes -127.
struct Lattice256 {
  float d;
  int32_t sums[16];
};
DASLLAMA_INLINE Lattice256 to_lattice_256(const float* x, int8_t* q) {
  const float top = first_of<256>(x, top_bits<256>(x));
  const float inverse = top != 0 ? -127.0f / top : 0.0f;
  Lattice256 block = {top != 0 ? 1.0f / inverse : 0.0f, {}};
  round_all<256>(x, inverse, q, block.sums);
  return block;
}

// Blocks of 32: f16 d, on Q8_1 f16 d * sum(q), int8 q[32].
template <bool with_sum>
static void quantize_32(const float* x, int64_t K, uint8_t* out) {
  for (int64_t b = 0; b < K / 32; b++, x += 32, out += with_sum ? 36 : 34) {
    const Lattice32 block = to_lattice_32(x, reinterpret_cast<int8_t*>(out + (with_sum ? 4 : 2)));
    store_u16(out, block.d_bits());
    if (with_sum) store_u16(out + 2, block.s_bits());
  }
}

// Blocks of 256: f32 d, int8 q[256], int16 sums of 16.
static void quantize_256(const float* x, int64_t K, uint8_t* out) {
  for (int64_t b = 0; b < K / 256; b++, x += 256, out += 292) {
    const Lattice256 block = to_lattice_256(x, reinterpret_cast<int8_t*>(out + 4));
    std::memcpy(out, &block.d, 4);
    for (int g = 0; g < 16; g++) store_u16(out + 260 + 2 * g, static_cast<uint16_t>(block.sums[g]));
  }
}

// Rows [begin, end) of x [rows, K] -> blocks of the lattice Q8_0, Q8_1 or Q8_K.
static void quantize_activation(int lattice, const float* x, int64_t K, uint8_t* out, int64_t row_bytes, int64_t begin,
                                int64_t end) {
  for (int64_t row = begin; row < end; row++) {
    const float* in = x + row * K;
    uint8_t* to = out + row * row_bytes;
    if (lattice == types::Q8_0) quantize_32<false>(in, K, to);
    if (lattice == types::Q8_1) quantize_32<true>(in, K, to);
    if (lattice == types::Q8_K) quantize_256(in, K, to);
  }
}

// A weight in Q8_0 rounds halves away from zero and multiplies with 1 / d; see ops/quantize.py.
static void pack_q8_0(const float* x, uint8_t* out) {
  const float d = as_float(top_bits<32>(x)) / 127.0f, inverse = d != 0 ? 1.0f / d : 0.0f;
  store_u16(out, f32_to_f16(d));
  int8_t q[32];
  for (int i = 0; i < 32; i++) {
    // Non-negative floats compare as integers; without float comparisons the compiler vectorizes this.
    const uint32_t bits = as_bits(x[i] * inverse), a = bits & 0x7fffffff;
    const float m = as_float(a < as_bits(127.5f) ? a : 0);
    const int32_t whole = static_cast<int32_t>(m);
    const int32_t nearest = whole + (as_bits(m - static_cast<float>(whole)) >= as_bits(0.5f) ? 1 : 0);
    const int32_t minus = -static_cast<int32_t>(bits >> 31);
    q[i] = static_cast<int8_t>((nearest ^ minus) - minus);
  }
  std::memcpy(out + 2, q, 32);
}

// Codes of 4 bits: x ~ d * (q - 8). Returns d.
static float to_nibbles(const float* x, uint8_t (&q)[32]) {
  const float d = first_of<32>(x, top_bits<32>(x)) / -8.0f, inverse = d != 0 ? 1.0f / d : 0.0f;
  for (int i = 0; i < 32; i++) {
    const float v = x[i] * inverse + 8.5f;
    q[i] = v > 0 ? static_cast<uint8_t>(v < 15.0f ? v : 15.0f) : 0;
  }
  return d;
}

static void pack_q4_0(const float* x, uint8_t* out) {
  uint8_t q[32];
  store_u16(out, f32_to_f16(to_nibbles(x, q)));
  for (int i = 0; i < 16; i++) out[2 + i] = static_cast<uint8_t>(q[i] | q[i + 16] << 4);
}

// n elements -> blocks of F32, F16, BF16, Q8_0 or Q4_0.
static void quantize(int qtype, const float* x, int64_t n, uint8_t* out) {
  switch (qtype) {
    case types::F32:
      std::memcpy(out, x, 4 * static_cast<size_t>(n));
      break;
    case types::F16:
      for (int64_t i = 0; i < n; i++) store_u16(out + 2 * i, f32_to_f16(x[i]));
      break;
    case types::BF16:
      for (int64_t i = 0; i < n; i++) store_u16(out + 2 * i, f32_to_bf16(x[i]));
      break;
    case types::Q8_0:
      for (int64_t i = 0; i < n; i += 32, out += 34) pack_q8_0(x + i, out);
      break;
    case types::Q4_0:
      for (int64_t i = 0; i < n; i += 32, out += 18) pack_q4_0(x + i, out);
      break;
  }
}
