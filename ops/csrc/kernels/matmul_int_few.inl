// The integer matmul for few rows of x: packed weights are read once and nothing is kept of them.
//
// A strip of kLanes weight rows goes along K together. A piece of one row (kUnits groups) is unpacked and multiplied with
// the same piece of each row of x, which leaves four partial sums per group; four rows are then added up at once
// (sum_quad), and a transposition of units brings all rows of the strip side by side: a vector with a lane per row for
// each group. From there on everything, scales included, is in lanes, and the fold is that of ops/quant_linear.py.

// sum[m][i]: the strip's dot products with row m of x for group i of the piece; a[m][part] are the rows of x.
template <class Source, int kParts, int kSets, int M, class Unpack>
static DASLLAMA_INLINE void strip_dots(const Unpack& unpack, const Ints (&a)[M][kSets * kParts],
                                       Ints (&sum)[kSets][M][kUnits]) {
#pragma GCC unroll 4
  for (int quad = 0; quad < kUnits; quad++) {
    Ints partial[kSets][M][4];
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++) {
      Ints w[kSets * kParts];
      unpack(4 * quad + r, w);
#pragma GCC unroll 2
      for (int set = 0; set < kSets; set++)
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) {
          const Ints *wp = w + set * kParts, *ap = a[m] + set * kParts;
          if constexpr (kParts == 2)
            partial[set][m][r] = dot<Source::kMax>(wp[0], ap[0], wp[1], ap[1]);
          else
            partial[set][m][r] = dot<Source::kMax>(wp[0], ap[0]);
        }
    }
#pragma GCC unroll 2
    for (int set = 0; set < kSets; set++)
#pragma GCC unroll 4
      for (int m = 0; m < M; m++) {
        const Ints* p = partial[set][m];
        sum[set][m][quad] = sum_quad<Source::kMax, kParts>(p[0], p[1], p[2], p[3]);
      }
  }
#pragma GCC unroll 2
  for (int set = 0; set < kSets; set++)
#pragma GCC unroll 4
    for (int m = 0; m < M; m++) transpose_units(sum[set][m]);
}

// Units at base + at(i), i = 0 .. kUnits - 1.
template <class At>
static DASLLAMA_INLINE Ints units_at(const int8_t* base, const At& at) {
  Unit units[kUnits];
  for (int i = 0; i < kUnits; i++) units[i] = load_unit(reinterpret_cast<const uint8_t*>(base + at(i)));
  return join_units(units);
}

// One piece of a strip whose groups have floats as scales.
template <class Source, int M, bool kFull>
static DASLLAMA_INLINE void few_piece32(Source& source, const IntMatmul& p, int64_t first, int64_t at, int last,
                                        Floats (&acc)[M]) {
  constexpr int kParts = Source::kParts, kGroup = 16 * kParts;
  const int64_t groups = p.K / kGroup, blocks = p.K / 32;
  source.begin(at, last);
  Ints a[M][kParts], sum[1][M][kUnits];
  for (int m = 0; m < M; m++)
    for (int part = 0; part < kParts; part++) {
      const uint8_t* x = reinterpret_cast<const uint8_t*>(p.x.q) + (first + m) * p.K + at * kGroup + 16 * part;
      a[m][part] = kFull ? load_units(x, kGroup) : load_units(x, kGroup, last);
    }
  const auto unpack = [&](int r, Ints* w) __attribute__((always_inline)) { source.template unpack<kFull>(r, w); };
  strip_dots<Source, kParts, 1, M>(unpack, a, sum);
#pragma GCC unroll 4
  for (int i = 0; i < kUnits; i++) {
    if (!kFull && i > last) break;
    Floats d, m_w = zero_floats();
    source.scales(i, d, m_w);
#pragma GCC unroll 4
    for (int m = 0; m < M; m++) {
      const int64_t row = first + m, block = row * blocks + (at + i) * kGroup / 32;
      const Ints isum = Source::kBias ? add(sum[0][m][i], splat_ints(p.x.init[row * groups + at + i])) : sum[0][m][i];
      acc[m] = fma(to_floats(isum), mul(d, splat_floats(p.x.d[block])), acc[m]);
      if (Source::kAdd) acc[m] = fma(m_w, splat_floats(p.x.s[block]), acc[m]);
    }
  }
}

template <class Source, int M>
static DASLLAMA_INLINE void few_strip32(const IntMatmul& p, const Strip& strip, int64_t first, Floats (&acc)[M]) {
  Source source(strip);
  const int64_t groups = p.K / (16 * Source::kParts);
  int64_t at = 0;
  for (; at + kUnits <= groups; at += kUnits) {
    few_piece32<Source, M, true>(source, p, first, at, kUnits - 1, acc);
  }
  if (at < groups) few_piece32<Source, M, false>(source, p, first, at, static_cast<int>(groups - at - 1), acc);
}

// Adds what one block's mins take away: sums of x per group times mins, exactly, in pairs.
template <class Scales>
static DASLLAMA_INLINE Floats fold_mins(const Scales& s, const int16_t* x_sums, float x_d, Floats acc) {
  Ints low = zero_ints();
  constexpr int kPairs = sizeof(s.mins) / sizeof(Ints);
#pragma GCC unroll 8
  for (int i = 0; i < kPairs; i++) {
    int32_t pair;
    std::memcpy(&pair, x_sums + 2 * i, 4);
    low = add(low, mul_pairs(s.mins[i], splat_ints(pair)));
  }
  return fnma(to_floats(low), mul(s.dmin, splat_floats(x_d)), acc);
}

template <class Source, int M>
static DASLLAMA_INLINE void few_strip256(const IntMatmul& p, const Strip& strip, int64_t first, Floats (&acc)[M]) {
  constexpr int kParts = Source::kParts, kSets = Source::kSets, kGroups = Source::kGroups, kGroup = 16 * kParts;
  Source source(strip);
  const int64_t blocks = p.K / 256;
  for (int64_t b = 0; b < blocks; b++) {
    source.begin(b);
    typename Source::Scales scales;
    source.scales(scales);
    Ints isum[M];
    for (int m = 0; m < M; m++) isum[m] = zero_ints();
    for (int step = 0; step < Source::kSteps; step++) {
      Ints a[M][kSets * kParts], sum[kSets][M][kUnits];
      for (int m = 0; m < M; m++)
        for (int set = 0; set < kSets; set++)
          for (int part = 0; part < kParts; part++)
            a[m][set * kParts + part] = units_at(p.x.q + (first + m) * p.K + b * 256 + 16 * part, [&](int i) {
              return Source::group(step, set, i) * kGroup;
            });
      const auto unpack = [&](int r, Ints* w) __attribute__((always_inline)) { source.unpack(r, step, w); };
      strip_dots<Source, kParts, kSets, M>(unpack, a, sum);
#pragma GCC unroll 2
      for (int set = 0; set < kSets; set++)
#pragma GCC unroll 4
        for (int i = 0; i < kUnits; i++) {
          const int g = Source::group(step, set, i);
#pragma GCC unroll 4
          for (int m = 0; m < M; m++) {
            Ints dots = sum[set][m][i];
            if (Source::kBias) dots = add(dots, splat_ints(p.x.init[((first + m) * blocks + b) * kGroups + g]));
            isum[m] = add(isum[m], mul(dots, scales.scale[g]));
          }
        }
    }
    for (int m = 0; m < M; m++) {
      const int64_t block = (first + m) * blocks + b;
      acc[m] = fma(to_floats(isum[m]), mul(scales.d, splat_floats(p.x.d[block])), acc[m]);
      if (Source::kMin) acc[m] = fold_mins(scales, p.x.sums + block * kGroups, p.x.d[block], acc[m]);
    }
  }
}
