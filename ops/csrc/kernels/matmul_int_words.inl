// The integer matmul for few rows of x where a scale belongs to 16 elements, on AVX2. Such scales would ask for a
// transposition and a multiplication of lanes every 16 elements. Here a row of weights goes through its block alone: each
// pair of products, still 16 bits, is multiplied with its group's scale when it is widened, all groups are added up
// in one register, and rows come together once for a block. The integers are those of few_strip256.

// 16 scales of a block of one row, as 16 bits: words 0 to 7 in both units of half[0], 8 to 15 in half[1].
struct RowScales {
  Ints half[2];
  explicit DASLLAMA_INLINE RowScales(Ints words)
      : half{_mm256_permute2x128_si256(words, words, 0x00), _mm256_permute2x128_si256(words, words, 0x11)} {}

  // Group g's in unit 0, that of g + 1 in unit 1; g is even.
  DASLLAMA_INLINE Ints pair(int g) const {
    const short a = static_cast<short>((2 * (g % 8) + 1) << 8 | 2 * (g % 8)), b = static_cast<short>(a + 0x0202);
    return _mm256_shuffle_epi8(half[g / 8], _mm256_set_m128i(_mm_set1_epi16(b), _mm_set1_epi16(a)));
  }
  // init of the groups times their scales, in no order.
  DASLLAMA_INLINE Ints times(const int32_t* init) const {
    const auto eight = [&](int h) __attribute__((always_inline)) {
      return mul(_mm256_cvtepi16_epi32(_mm256_castsi256_si128(half[h])), load_ints(init + 8 * h));
    };
    return add(eight(0), eight(1));
  }
};

// What few_rows256 wants of a type T of blocks_simd.h.
template <class T>
struct InWords {
  static constexpr bool kServes = false;
};

template <>
struct InWords<FastQ6_K> {
  static constexpr bool kServes = true;
  static DASLLAMA_INLINE Floats d(const uint8_t* block, const Offsets& offset) {
    return high_half(gather_lanes(block + 206, offset));
  }
  static DASLLAMA_INLINE RowScales scales(const uint8_t* block) {
    return RowScales(_mm256_cvtepi8_epi16(load_unit(block + 192)));
  }
};

template <>
struct InWords<FastQ3_K> {
  static constexpr bool kServes = true;
  static DASLLAMA_INLINE Floats d(const uint8_t* block, const Offsets& offset) {
    return high_half(gather_lanes(block + 106, offset));
  }
  // See FastQ3_K::scales.
  static DASLLAMA_INLINE RowScales scales(const uint8_t* block) {
    constexpr uint64_t fours = 0x0f0f0f0f0f0f0f0f, twos = 0x3030303030303030;
    const uint64_t low = load_u32(block + 96) | uint64_t{load_u32(block + 100)} << 32;
    const uint64_t high = load_u32(block + 104), first = high << 4 | high << 34, second = high | high << 30;
    const __m128i six = _mm_set_epi64x(static_cast<int64_t>((low >> 4 & fours) | (second & twos)),
                                       static_cast<int64_t>((low & fours) | (first & twos)));
    return RowScales(_mm256_sub_epi16(_mm256_cvtepu8_epi16(six), _mm256_set1_epi16(32)));
  }
};

// Scales 2 n + 1, n of 4 bits.
template <int kAt>
struct OddInWords {
  static constexpr bool kServes = true;
  static DASLLAMA_INLINE Floats d(const uint8_t* block, const Offsets& offset) {
    return scaled_half(gather_lanes(block, offset), 0.125f);
  }
  static DASLLAMA_INLINE RowScales scales(const uint8_t* block) {
    const __m128i q = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(block + kAt)), four = _mm_set1_epi8(15);
    const __m128i n = _mm_unpacklo_epi8(_mm_and_si128(q, four), _mm_and_si128(_mm_srli_epi16(q, 4), four));
    const Ints words = _mm256_cvtepu8_epi16(n);
    return RowScales(_mm256_add_epi16(_mm256_add_epi16(words, words), _mm256_set1_epi16(1)));
  }
};
template <>
struct InWords<FastIQ2_XS> : OddInWords<66> {};
template <>
struct InWords<FastIQ2_S> : OddInWords<74> {};

// v[r], of row r -> lane r is the sum over v[r].
DASLLAMA_INLINE Ints sum_rows(const Ints (&v)[kLanes]) {
  const Ints low = sum_quad<128, 2>(v[0], v[1], v[2], v[3]), high = sum_quad<128, 2>(v[4], v[5], v[6], v[7]);
  return add(_mm256_permute2x128_si256(low, high, 0x20), _mm256_permute2x128_si256(low, high, 0x31));
}

template <class Source, class T, int M>
static DASLLAMA_INLINE void few_rows256(const IntMatmul& p, const Strip& strip, int64_t first, Floats (&acc)[M]) {
  Source source(strip);
  const int64_t blocks = p.K / 256;
  for (int64_t b = 0; b < blocks; b++) {
    source.begin(b);
    Ints total[M][kLanes];
#pragma GCC unroll 1
    for (int r = 0; r < kLanes; r++) {
      const RowScales scales = InWords<T>::scales(strip.row[r] + source.at);
      Ints sum[M];
      for (int m = 0; m < M; m++)
        sum[m] = Source::kBias ? scales.times(p.x.init + ((first + m) * blocks + b) * 16) : zero_ints();
#pragma GCC unroll 8
      for (int step = 0; step < Source::kSteps; step++) {
        Ints w[Source::kSets];
        source.unpack(r, step, w);
#pragma GCC unroll 2
        for (int set = 0; set < Source::kSets; set++) {
          const int g = Source::group(step, set, 0);
          const Ints scale = scales.pair(g);
#pragma GCC unroll 4
          for (int m = 0; m < M; m++) {
            const Ints x = source.x(r, step, load_ints(p.x.q + (first + m) * p.K + b * 256 + 16 * g));
            sum[m] = add(sum[m], mul_pairs(byte_pairs<Source::kMax>(w[set], x), scale));
          }
        }
      }
      for (int m = 0; m < M; m++) total[m][r] = sum[m];
    }
    const Floats d = InWords<T>::d(strip.row[0] + source.at, strip.offset);
    for (int m = 0; m < M; m++)
      acc[m] = fma(to_floats(sum_rows(total[m])), mul(d, splat_floats(p.x.d[(first + m) * blocks + b])), acc[m]);
  }
}
