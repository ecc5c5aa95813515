// The integer matmul for few rows of x on x86, where blocks have 256 elements: weights are read in the order of memory, row
// after row, which is what a processor's own prefetch follows best; Zen 4 reads two to three times as fast so as it reads
// a strip's rows side by side. A row goes through its blocks alone: each pair of products, still 16 bits, is multiplied
// with its group's scale when it is widened, and all groups of a block are added up in one register, of which a unit is
// kept. Then rows come together in lanes, once for a block, for the fold of ops/quant_linear.py. The integers are those
// of few_strip256.

// How a block of type T of blocks_simd.h is read: Row unpacks it, scales() and mins() are words, one for each group.
template <class T>
struct InWords {
  static constexpr bool kServes = false;
};

template <class T>
struct PackedRow {
  static constexpr int kMax = T::kMax, kBias = T::kBias;
  static constexpr int kTogether = 1;  // blocks to take up before one is unpacked
  const uint8_t* block;
  DASLLAMA_INLINE void take(const uint8_t* p) { block = p; }
  DASLLAMA_INLINE void unpack(int step, Ints* w) const { T::unpack(block, step, w); }
  DASLLAMA_INLINE Ints x(int, Ints a) const { return a; }
};

// Points of a grid stay unsigned and go from it to registers, as x takes their signs; without signs they need no bias.
template <class T>
struct PointsRow {
  static constexpr int kMax = T::kBias, kBias = 0;
  static constexpr int kTogether = 4;
  alignas(64) uint16_t index[32];
  uint8_t signs[32];
  DASLLAMA_INLINE void take(const uint8_t* block) { T::split(block, index, signs); }
  DASLLAMA_INLINE void unpack(int step, Ints* w) const { w[0] = points(T::kGrid, index + kPiece / 8 * step); }
  DASLLAMA_INLINE Ints x(int step, Ints a) const { return plus_minus(zero_ints(), a, signs + kPiece / 8 * step); }
};

template <class T>
struct PackedInWords {
  static constexpr bool kServes = true;
  typedef PackedRow<T> Row;
};

template <>
struct InWords<FastQ6_K> : PackedInWords<FastQ6_K> {
  static DASLLAMA_INLINE __m256i scales(const uint8_t* block) { return _mm256_cvtepi8_epi16(load_unit(block + 192)); }
};

template <>
struct InWords<FastQ3_K> : PackedInWords<FastQ3_K> {
  // See FastQ3_K::scales.
  static DASLLAMA_INLINE __m256i scales(const uint8_t* block) {
    constexpr uint64_t fours = 0x0f0f0f0f0f0f0f0f, twos = 0x3030303030303030;
    const uint64_t low = load_u32(block + 96) | uint64_t{load_u32(block + 100)} << 32;
    const uint64_t high = load_u32(block + 104), first = high << 4 | high << 34, second = high | high << 30;
    const __m128i six = _mm_set_epi64x(static_cast<int64_t>((low >> 4 & fours) | (second & twos)),
                                       static_cast<int64_t>((low & fours) | (first & twos)));
    return _mm256_sub_epi16(_mm256_cvtepu8_epi16(six), _mm256_set1_epi16(32));
  }
};

template <>
struct InWords<FastQ2_K> : PackedInWords<FastQ2_K> {
  static DASLLAMA_INLINE __m256i scales(const uint8_t* block) {
    return _mm256_cvtepu8_epi16(_mm_and_si128(load_unit(block), _mm_set1_epi8(15)));
  }
  static DASLLAMA_INLINE __m256i mins(const uint8_t* block) {
    return _mm256_cvtepu8_epi16(_mm_and_si128(_mm_srli_epi16(load_unit(block), 4), _mm_set1_epi8(15)));
  }
};

template <>
struct InWords<FastTQ2_0> : PackedInWords<FastTQ2_0> {
  static DASLLAMA_INLINE __m256i scales(const uint8_t*) { return _mm256_set1_epi16(1); }
};

// See six_bit_scales.
template <class T>
struct SixBitsInWords : PackedInWords<T> {
  static DASLLAMA_INLINE __m256i words(uint32_t first, uint32_t second) {
    return _mm256_cvtepu8_epi16(_mm_cvtsi64_si128(static_cast<int64_t>(first | uint64_t{second} << 32)));
  }
  static DASLLAMA_INLINE __m256i scales(const uint8_t* block) {
    const uint32_t low = load_u32(block + 4), high = load_u32(block + 12);
    return words(low & 0x3f3f3f3f, (high & 0x0f0f0f0f) | (low >> 2 & 0x30303030));
  }
  static DASLLAMA_INLINE __m256i mins(const uint8_t* block) {
    const uint32_t mid = load_u32(block + 8), high = load_u32(block + 12);
    return words(mid & 0x3f3f3f3f, (high >> 4 & 0x0f0f0f0f) | (mid >> 2 & 0x30303030));
  }
};
template <>
struct InWords<FastQ4_K> : SixBitsInWords<FastQ4_K> {};
template <>
struct InWords<FastQ5_K> : SixBitsInWords<FastQ5_K> {};

template <>
struct InWords<FastIQ4_XS> : PackedInWords<FastIQ4_XS> {
  // See FastIQ4_XS::scales.
  static DASLLAMA_INLINE __m256i scales(const uint8_t* block) {
    const __m256i low = _mm256_set1_epi32(static_cast<int>(load_u32(block + 4)));
    const __m256i high = _mm256_set1_epi32(load_u16(block + 2) << 4);
    const __m256i four = _mm256_and_si256(_mm256_srlv_epi32(low, _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28)),
                                          _mm256_set1_epi32(0x0f));
    const __m256i two = _mm256_and_si256(_mm256_srlv_epi32(high, _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14)),
                                         _mm256_set1_epi32(0x30));
    const __m256i six = _mm256_sub_epi32(_mm256_or_si256(four, two), _mm256_set1_epi32(32));
    return _mm256_permute4x64_epi64(_mm256_packs_epi32(six, _mm256_setzero_si256()), 0xd8);
  }
};

// Scales 2 n + 1, n of 4 bits.
template <class T, int kAt>
struct PointsInWords {
  static constexpr bool kServes = true;
  typedef PointsRow<T> Row;
  static DASLLAMA_INLINE __m256i scales(const uint8_t* block) {
    const __m128i q = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(block + kAt)), four = _mm_set1_epi8(15);
    const __m128i n = _mm_unpacklo_epi8(_mm_and_si128(q, four), _mm_and_si128(_mm_srli_epi16(q, 4), four));
    const __m256i words = _mm256_cvtepu8_epi16(n);
    return _mm256_add_epi16(_mm256_add_epi16(words, words), _mm256_set1_epi16(1));
  }
};
template <>
struct InWords<FastIQ2_XS> : PointsInWords<FastIQ2_XS, 66> {};
template <>
struct InWords<FastIQ2_S> : PointsInWords<FastIQ2_S, 74> {};

// Words of kGroups groups times the sums of x in them.
template <int kGroups>
static DASLLAMA_INLINE Unit words_times(__m256i words, const int16_t* x_sums) {
  const uint8_t* sums = reinterpret_cast<const uint8_t*>(x_sums);
  if constexpr (kGroups == 8) return _mm_madd_epi16(_mm256_castsi256_si128(words), load_unit(sums));
  return sum_units(_mm256_madd_epi16(words, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(sums))));
}

// One unit for each row of a strip, placed so that sum_quad puts the sum over row r's into lane r.
struct UnitPerRow {
  alignas(64) Unit unit[4][kUnits];
  DASLLAMA_INLINE Unit& operator[](int r) { return unit[r % 4][r / 4]; }
  DASLLAMA_INLINE Ints sums() const {
    const auto load = [&](int i) __attribute__((always_inline)) { return load_ints(unit[i]); };
    return sum_quad<128, 2>(load(0), load(1), load(2), load(3));
  }
};

// What is kept of a block of kLanes rows until all of them are there.
template <bool kMin, int M>
struct BlockSums {
  alignas(64) int32_t head[kLanes];
  UnitPerRow dots[M], mins[kMin ? M : 1];
};

// The products of block b of row r, that of `block`; x is arranged (arrange_x).
template <class T, int M, class Row>
static DASLLAMA_INLINE void row_block(const IntMatmul& p, const Row& row, const uint8_t* block, const int8_t* x, int r,
                                      int64_t b, int64_t first, BlockSums<T::kMin, M>& sums) {
  typedef InWords<T> Words;
  constexpr int kParts = T::kParts, kSets = T::kSets, kGroups = T::kGroups;
  const int64_t blocks = p.K / 256;
  const __m256i scales = Words::scales(block);
  Ints sum[M];
  for (int m = 0; m < M; m++) sum[m] = zero_ints();
#pragma GCC unroll 8
  for (int step = 0; step < T::kSteps; step++) {
    Ints w[kSets * kParts];
    row.unpack(step, w);
#pragma GCC unroll 2
    for (int set = 0; set < kSets; set++) {
      const Ints scale = words_of(scales, [&](int i) { return int64_t{T::group(step, set, i)}; });
      const Ints* wp = w + set * kParts;
#pragma GCC unroll 4
      for (int m = 0; m < M; m++) {
        const int8_t* a = x + (m * blocks + b) * 256 + (step * kSets + set) * kParts * sizeof(Ints);
        if constexpr (kParts == 2)
          sum[m] = add_scaled_dots<Row::kMax>(sum[m], wp[0], load_ints(a), wp[1], load_ints(a + sizeof(Ints)), scale);
        else
          sum[m] = add_scaled_dots<Row::kMax>(sum[m], wp[0], row.x(step, load_ints(a)), scale);
      }
    }
  }
  std::memcpy(&sums.head[r], block + T::kHead, 4);
  for (int m = 0; m < M; m++) {
    const int16_t* x_sums = p.x.sums + ((first + m) * blocks + b) * kGroups;
    Unit unit = sum_units(sum[m]);
    if constexpr (Row::kBias != 0)
      unit = _mm_sub_epi32(unit, _mm_mullo_epi32(words_times<kGroups>(scales, x_sums), _mm_set1_epi32(Row::kBias)));
    sums.dots[m][r] = unit;
    if constexpr (T::kMin) sums.mins[m][r] = words_times<kGroups>(Words::mins(block), x_sums);
  }
}

// Rows first .. first + M - 1 of x, each part of a block as its weights are unpacked.
template <class T, int M>
static DASLLAMA_INLINE const int8_t* arrange_x(const IntMatmul& p, int64_t first) {
  int8_t* x = static_cast<int8_t*>(thread_scratch(static_cast<size_t>(M * p.K)));
  int8_t* to = x;
  for (int64_t begin = first * p.K; begin < (first + M) * p.K; begin += 256)
    for (int step = 0; step < T::kSteps; step++)
      for (int set = 0; set < T::kSets; set++)
        for (int part = 0; part < T::kParts; part++, to += sizeof(Ints))
          store_ints(to, units_at(p.x.q + begin + 16 * part,
                                  [&](int i) { return T::group(step, set, i) * 16 * T::kParts; }));
  return x;
}

// Elements of x, all of its rows together, that stay in the first-level cache while a row of weights goes through it, and
// bytes to ask for ahead of that. With more of x, a block of each row in turn is the better order.
constexpr int kWholeRows = 8192, kRowAhead = 4096;

// With more of x, strips are as fast or faster where a scale belongs to 32 elements.
template <class T, int M>
static DASLLAMA_INLINE bool rows_serve(int64_t K) {
  return T::kParts == 1 || M * K <= kWholeRows;
}

template <class T, int M>
static DASLLAMA_NOINLINE void few_rows256(const IntMatmul& p, int64_t n_begin, int64_t n_end, int64_t first) {
  typedef typename InWords<T>::Row Row;
  typedef BlockSums<T::kMin, M> Sums;
  const int64_t blocks = p.K / 256;
  const bool whole = T::kParts == 2 || M * p.K <= kWholeRows;
  const int8_t* x = arrange_x<T, M>(p, first);
  Sums kept[kWholeRows / 256 / M];
  for (int64_t n = n_begin; n < n_end; n += kLanes) {
    const Strip strip(p.w, p.row_bytes, n, p.N);
    Floats acc[M];
    for (int m = 0; m < M; m++) acc[m] = zero_floats();
    for (int64_t begin = 0; begin < blocks; begin += whole ? blocks : Row::kTogether) {
      const int64_t end = whole ? blocks : std::min(begin + Row::kTogether, blocks);
#pragma GCC unroll 1
      for (int r = 0; r < kLanes; r++)
#pragma GCC unroll 1
        for (int64_t b = begin; b < end; b += Row::kTogether) {
          const int count = Row::kTogether == 1 ? 1 : static_cast<int>(std::min<int64_t>(Row::kTogether, end - b));
          const uint8_t* block = strip.row[r] + b * T::kBytes;
          if (whole)
            prefetch_lines(block + kRowAhead, Row::kTogether * T::kBytes);
          else
            strip.prefetch(r, b * T::kBytes, Row::kTogether * T::kBytes);
          Row row[Row::kTogether];
          for (int i = 0; i < count; i++) row[i].take(block + i * T::kBytes);
          for (int i = 0; i < count; i++)
            row_block<T, M>(p, row[i], block + i * T::kBytes, x, r, b + i, first, kept[b + i - begin]);
        }
      for (int64_t b = begin; b < end; b++) {
        const Sums& sums = kept[b - begin];
        const Ints head = load_ints(sums.head);
        const Floats d = T::d(head);
        for (int m = 0; m < M; m++) {
          const Floats x_d = splat_floats(p.x.d[(first + m) * blocks + b]);
          acc[m] = fma(to_floats(sums.dots[m].sums()), mul(d, x_d), acc[m]);
          if (T::kMin) acc[m] = fnma(to_floats(sums.mins[m].sums()), mul(high_half(head), x_d), acc[m]);
        }
      }
    }
    for (int m = 0; m < M; m++) store_outputs(p, first + m, n, acc[m]);
  }
}
