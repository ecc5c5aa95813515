// The first half of attention's arithmetic: the dot products of a tile's vectors with a block of 64 keys.
//
// Floats run in 16 lanes over D and end in sum16's tree. Codes are multiplied as integers with the query, which is
// rounded once to blocks of 32 int8, by the integer matmul: a page's rows are rows of packed weights to it. It adds
// float(products of a block) * (d of the query * d of the key), block after block (ops/quant_linear.py).

// Register tiles: vectors times 4 keys (2 keys for 4 vectors where there are 16 registers).
constexpr int kScoreRows = kManyRegisters ? 4 : 3, kMostScores = 4;

// Q vectors times K keys. One register's worth of the 16 lanes at a time, so that all sums stay in registers.
template <int Q, int K, class T>
DASLLAMA_INLINE void dots(const float* q, const T* k, int64_t stride, int64_t D, float* scores) {
  constexpr int parts = 16 / kWidth;
  fvec lanes[K][4][parts] = {};
#pragma GCC unroll 4
  for (int part = 0; part < parts; part++) {
    fvec sums[Q][K] = {};
    for (int64_t d = part * kWidth; d < D; d += 16) {
      fvec x[Q];  // these stay, keys pass: 12 sums, 3 vectors and a key are 16 registers
#pragma GCC unroll 4
      for (int i = 0; i < Q; i++) x[i] = load<fvec>(q + i * D + d);
#pragma GCC unroll 4
      for (int j = 0; j < K; j++) {
        const fvec key = load<fvec>(k + j * stride + d);
#pragma GCC unroll 4
        for (int i = 0; i < Q; i++) sums[i][j] = fma(x[i], key, sums[i][j]);
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < Q; i++)
#pragma GCC unroll 4
      for (int j = 0; j < K; j++) lanes[j][i][part] = sums[i][j];
  }
#if defined(DASLLAMA_ISA_AVX512)
  sum16(&lanes[0][0][0], Q, scores, kKeys);
#else
  const auto at = [&](int i, int j) { return join<f32x16>(lanes[j][i]); };
#pragma GCC unroll 4
  for (int i = 0; i < Q; i += 4 / K) {
    if constexpr (K == 4) {
      sum16(at(i, 0), at(i, 1), at(i, 2), at(i, 3), scores + i * kKeys);
    } else {
      float four[4];
      sum16(at(i, 0), at(i, 1), at(i + 1, 0), at(i + 1, 1), four);
      std::memcpy(scores + i * kKeys, four, 2 * sizeof(float));
      std::memcpy(scores + (i + 1) * kKeys, four + 2, 2 * sizeof(float));
    }
  }
#endif
}

template <class T>
static void score_floats(const float* q, const T* k, int64_t stride, int64_t D, const Range* ranges, int64_t vectors,
                         float* scores, Ahead ahead) {
  // Keys that all tiles visit before the next ones: 16 kB of them stay in the first-level cache.
  const int step = D >= 1024 ? 4 : static_cast<int>(4096 / D & ~3);
  for (int first = 0; first < kKeys; first += step)
    for (int64_t i = 0; i < vectors;) {
      const int64_t n = next_tile(vectors - i, kScoreRows, kMostScores);
      const Range all = hull(ranges + i, n);
      const int begin = all.begin > first ? all.begin : first, end = all.end < first + step ? all.end : first + step;
      with_rows<kMostScores>(n, [&](auto rows) {
        constexpr int Q = rows, K = Q == 4 && !kManyRegisters ? 2 : 4;
        for (int j = begin & -K; j < end; j += K) {
          ahead.with_keys(j, j + K);
          dots<Q, K>(q + i * D, k + j * stride, stride, D, scores + i * kKeys + j);
        }
      });
      i += n;
    }
}

// The integers of a tile's vectors, as the integer matmul takes them. memory: for `vectors` rows of width floats.
static IntActivation query_codes(float* memory, int64_t vectors, int64_t width) {
  IntActivation x = {};
  x.d = memory;
  x.init = reinterpret_cast<int32_t*>(x.d + vectors * width / 32);
  x.q = reinterpret_cast<int8_t*>(x.init + vectors * width / 16);
  return x;
}

// Even elements, then odd ones: the two codes of a byte are neighbours in tq4, and 16 elements apart to the matmul.
static void deal_codes(int8_t* q) {
  int8_t even[16], odd[16];
  for (int i = 0; i < 16; i++) even[i] = q[2 * i], odd[i] = q[2 * i + 1];
  std::memcpy(q, even, 16);
  std::memcpy(q + 16, odd, 16);
}

// Row i of x from a query head of keys.D elements, in `head`, which has keys.width and is overwritten.
static void round_query(const KVCache& keys, IntTraits traits, float* head, const IntActivation& x, int64_t i) {
  const int64_t width = keys.width, groups = width / traits.group;
  for (int64_t d = round16(keys.D); d < width; d += 16) store16(head + d, f32x16{});
  if (keys.rotated()) rotate(head, width);
  int8_t* q = x.q + i * width;
  for (int64_t b = 0; b < width / 32; b++) {
    x.d[i * (width / 32) + b] = to_lattice_32(head + 32 * b, q + 32 * b).d;
    if (keys.codec == kv::TQ4) deal_codes(q + 32 * b);
  }
  for (int64_t g = 0; g < groups; g++) {
    int32_t sum = 0;
    for (int e = 0; e < traits.group; e++) sum += q[g * traits.group + e];
    x.init[i * groups + g] = -traits.bias * sum;
  }
}

// Scores of the vectors that see keys of the block, for all keys that any of them sees.
static void score_codes(const AttentionArgs& a, const IntActivation& x, const Block& k, const Range* ranges,
                        int64_t vectors, float* scores) {
  const int type = kv::codecs[a.k.codec].type;
  const int64_t strip = a.integer->traits(type).strip;
  const Range keys = hull(ranges, vectors);
  int64_t first = 0, last = vectors;
  while (ranges[first].empty()) first++;
  while (ranges[last - 1].empty()) last--;
  const IntMatmul p = {x, static_cast<const uint8_t*>(k.data), k.stride, type, nullptr, scores, kKeys, a.k.width, nullptr};
  const int64_t end = (keys.end + strip - 1) / strip * strip;
  a.integer->matmul(p, keys.begin / strip * strip, end < kKeys ? end : kKeys, first, last);
}
