// The integer matmul for many rows of x: strips of weights are unpacked into a panel once, and the rows of x pass by.
//
// Panel of a strip: bytes [K / 4][tile_planes][kLanes][4], so that one vector holds 4 consecutive weights of each row, or one
// nibble of them where an instruction set wants signed weights so (store_weights). The strip's scales follow in vectors: d
// [groups] and m [groups], or one SuperScales per 256 whose scales went through tile_scale. A register tile is up to kTileRows
// rows of x by kTileStrips strips: 4 bytes of x are broadcast and multiplied with a vector of each strip, a lane sums up
// one weight row, and the fold of ops/quant_linear.py needs no lane to look at another. A task owns its strips and its
// rows of x; the panel lives in the thread's scratch.

// The part of a panel that holds element k.
template <int kMax, class Byte>
DASLLAMA_INLINE Byte* panel_at(Byte* panel, int64_t k) {
  return panel + k * kLanes * tile_planes(kMax);
}

// Writes one part of a piece of all rows: weights[r] holds kUnits units of row r, unit i has elements k(i) .. k(i) + 15.
template <int kMax, class K>
static DASLLAMA_INLINE void store_part(uint8_t* panel, Ints (&weights)[kLanes], int units, const K& k) {
  for (int quad = 0; quad < kUnits; quad++) transpose_quad(weights + 4 * quad);
  for (int four = 0; four < 4; four++) {
    Ints v[kUnits];
    for (int quad = 0; quad < kUnits; quad++) v[quad] = weights[4 * quad + four];
    transpose_units(v);
    for (int i = 0; i < units; i++) store_weights<kMax>(panel_at<kMax>(panel, k(i) + 4 * four), v[i]);
  }
}

// The products and the fold of a tile are the same for all types whose panels look alike.
template <int kGroup, int kMax, bool kBiased, bool kAdd>
struct Tile32 {
  template <int MR, int NR>
  static DASLLAMA_INLINE void sums(const IntMatmul& p, int64_t first, uint8_t* const* panel, Floats (&acc)[MR][NR]) {
    const int64_t groups = p.K / kGroup, blocks = p.K / 32;
    const uint8_t* w[NR];
    const Floats* scales[NR];
    const int8_t* x[MR];
    for (int n = 0; n < NR; n++) {
      w[n] = panel[n];
      scales[n] = reinterpret_cast<const Floats*>(panel_at<kMax>(panel[n], p.K));
    }
    for (int m = 0; m < MR; m++) x[m] = p.x.q + (first + m) * p.K;
    for (int64_t g = 0; g < groups; g++) {
      Ints sum[MR][NR];
#pragma GCC unroll 8
      for (int m = 0; m < MR; m++)
#pragma GCC unroll 4
        for (int n = 0; n < NR; n++)
          sum[m][n] = kBiased ? splat_ints(p.x.init[(first + m) * groups + g]) : zero_ints();
      tile_dots<kMax, kGroup, MR, NR>(w, x, sum);
#pragma GCC unroll 8
      for (int m = 0; m < MR; m++) {
        const int64_t block = (first + m) * blocks + g * kGroup / 32;
        const Floats x_d = splat_floats(p.x.d[block]);
#pragma GCC unroll 4
        for (int n = 0; n < NR; n++) {
          acc[m][n] = fma(to_floats(sum[m][n]), mul(scales[n][g], x_d), acc[m][n]);
          if (kAdd) acc[m][n] = fma(scales[n][groups + g], splat_floats(p.x.s[block]), acc[m][n]);
        }
        x[m] += kGroup;
      }
      for (int n = 0; n < NR; n++) w[n] = panel_at<kMax>(w[n], kGroup);
    }
  }
};

template <int kGroup, int kMax, int kBias, bool kMin>
struct Tile256 {
  static constexpr int kGroups = 256 / kGroup;
  typedef SuperScales<kGroups, kMin> Scales;

  template <int MR, int NR>
  static DASLLAMA_INLINE void sums(const IntMatmul& p, int64_t first, uint8_t* const* panel, Floats (&acc)[MR][NR]) {
    const int64_t blocks = p.K / 256;
    const uint8_t* w[NR];
    const Scales* scales[NR];
    const int8_t* x[MR];
    const int32_t* init[MR];
    for (int n = 0; n < NR; n++) {
      w[n] = panel[n];
      scales[n] = reinterpret_cast<const Scales*>(panel_at<kMax>(panel[n], p.K));
    }
    for (int m = 0; m < MR; m++) {
      x[m] = p.x.q + (first + m) * p.K;
      init[m] = p.x.init + (first + m) * blocks * kGroups;
    }
    for (int64_t b = 0; b < blocks; b++) {
      Ints isum[MR][NR];
      for (int m = 0; m < MR; m++)
        for (int n = 0; n < NR; n++) isum[m][n] = zero_ints();
      for (int g = 0; g < kGroups; g++) {
        Ints scale[NR];
        for (int n = 0; n < NR; n++) scale[n] = scales[n][b].scale[g];
        tile_scaled_dots<kMax, kGroup, kBias != 0, MR, NR>(w, x, init, scale, isum);
        for (int m = 0; m < MR; m++) {
          x[m] += kGroup;
          init[m]++;
        }
        for (int n = 0; n < NR; n++) w[n] = panel_at<kMax>(w[n], kGroup);
      }
#pragma GCC unroll 8
      for (int m = 0; m < MR; m++) {
        const int64_t block = (first + m) * blocks + b;
        const int16_t* x_sums = p.x.sums + block * kGroups;
        const float x_d = p.x.d[block];
#pragma GCC unroll 4
        for (int n = 0; n < NR; n++) {
          const Scales& s = scales[n][b];
          const Ints sum = kBias ? unbias<kBias, kGroups>(isum[m][n], s.scale, x_sums) : isum[m][n];
          acc[m][n] = fma(to_floats(sum), mul(s.d, splat_floats(x_d)), acc[m][n]);
          if (kMin) acc[m][n] = fold_mins(s, x_sums, x_d, acc[m][n]);
        }
      }
    }
  }
};

template <class WeightSource>
struct Panel32 {
  typedef WeightSource Source;
  static constexpr int kGroup = 16 * Source::kParts, kMax = Source::kMax;
  typedef Tile32<kGroup, tile_max(kMax), tile_bias(kMax, Source::kBias) != 0, Source::kAdd> Tile;

  static int64_t bytes(int64_t K) { return K * kLanes * tile_planes(kMax) + K / kGroup * (Source::kAdd ? 2 : 1) * sizeof(Floats); }

  template <bool kFull>
  static DASLLAMA_INLINE void fill_piece(Source& source, int64_t at, int last, int64_t K, uint8_t* panel) {
    Floats* scales = reinterpret_cast<Floats*>(panel_at<kMax>(panel, K));
    source.begin(at, last);
    Ints weights[Source::kParts][kLanes];
    for (int r = 0; r < kLanes; r++) {
      Ints w[Source::kParts];
      source.template unpack<kFull>(r, w);
      for (int part = 0; part < Source::kParts; part++) weights[part][r] = w[part];
    }
    for (int part = 0; part < Source::kParts; part++)
      store_part<kMax>(panel, weights[part], last + 1, [&](int i) { return (at + i) * kGroup + 16 * part; });
    for (int i = 0; i <= last; i++) {
      Floats d, m = zero_floats();
      source.scales(i, d, m);
      scales[at + i] = d;
      if (Source::kAdd) scales[K / kGroup + at + i] = m;
    }
  }

  static void fill(const Strip& strip, int64_t K, uint8_t* panel) {
    Source source(strip);
    const int64_t groups = K / kGroup;
    int64_t at = 0;
    for (; at + kUnits <= groups; at += kUnits) fill_piece<true>(source, at, kUnits - 1, K, panel);
    if (at < groups) fill_piece<false>(source, at, static_cast<int>(groups - at - 1), K, panel);
  }
};

template <class WeightSource>
struct Panel256 {
  typedef WeightSource Source;
  static constexpr int kParts = Source::kParts, kGroup = 16 * kParts, kMax = Source::kMax;
  typedef typename Source::Scales Scales;
  typedef Tile256<kGroup, tile_max(kMax), tile_bias(kMax, Source::kBias), Source::kMin> Tile;

  static int64_t bytes(int64_t K) { return K * kLanes * tile_planes(kMax) + K / 256 * sizeof(Scales); }

  static void fill(const Strip& strip, int64_t K, uint8_t* panel) {
    Source source(strip);
    Scales* scales = reinterpret_cast<Scales*>(panel_at<kMax>(panel, K));
    for (int64_t b = 0; b < K / 256; b++) {
      source.begin(b);
      source.scales(scales[b]);
      for (Ints& scale : scales[b].scale) scale = tile_scale(scale);
      for (int step = 0; step < Source::kSteps; step++) {
        Ints weights[Source::kSets * kParts][kLanes];
        for (int r = 0; r < kLanes; r++) {
          Ints w[Source::kSets * kParts];
          source.unpack(r, step, w);
          for (int v = 0; v < Source::kSets * kParts; v++) weights[v][r] = w[v];
        }
        for (int v = 0; v < Source::kSets * kParts; v++)
          store_part<kMax>(panel, weights[v], kUnits, [&](int i) {
            return b * 256 + Source::group(step, v / kParts, i) * kGroup + v % kParts * 16;
          });
      }
    }
  }
};

// Rows first .. first + MR - 1 of y, kTileStrips strips from column n on; outputs beyond N are not stored.
template <class Tile, int MR>
static DASLLAMA_NOINLINE void many_tile(const IntMatmul& p, int64_t first, int64_t n, uint8_t* const* panel) {
  Floats acc[MR][kTileStrips];
  for (int m = 0; m < MR; m++)
    for (int strip = 0; strip < kTileStrips; strip++) acc[m][strip] = zero_floats();
  Tile::template sums<MR, kTileStrips>(p, first, panel, acc);
  for (int m = 0; m < MR; m++)
    for (int strip = 0; strip < kTileStrips; strip++) store_outputs(p, first + m, n + strip * kLanes, acc[m][strip]);
}

template <class Tile>
static void many_rows(const IntMatmul& p, int64_t begin, int64_t end, int64_t n, uint8_t* const* panel) {
  int64_t m = begin;
  for (; m + kTileRows <= end; m += kTileRows) many_tile<Tile, kTileRows>(p, m, n, panel);
  static_assert(kTileRows <= 6, "a case for each rest");
  switch (end - m) {
    case 5: return many_tile<Tile, 5>(p, m, n, panel);
    case 4: return many_tile<Tile, 4>(p, m, n, panel);
    case 3: return many_tile<Tile, 3>(p, m, n, panel);
    case 2: return many_tile<Tile, 2>(p, m, n, panel);
    case 1: return many_tile<Tile, 1>(p, m, n, panel);
  }
}

template <class Panel>
static void matmul_many(const IntMatmul& p, int64_t n_begin, int64_t n_end, int64_t m_begin, int64_t m_end) {
  const int64_t bytes = (Panel::bytes(p.K) + 63) / 64 * 64;
  uint8_t* scratch = static_cast<uint8_t*>(thread_scratch(static_cast<size_t>(bytes * kTileStrips)));
  for (int64_t n = n_begin; n < n_end; n += kTileStrips * kLanes) {
    uint8_t* panel[kTileStrips];
    for (int i = 0; i < kTileStrips; i++) {
      const bool exists = n + i * kLanes < n_end;
      panel[i] = exists ? scratch + i * bytes : panel[0];
      if (exists) Panel::fill(Strip(p.w, p.row_bytes, n + i * kLanes, p.N), p.K, panel[i]);
    }
    many_rows<typename Panel::Tile>(p, m_begin, m_end, n, panel);
  }
}
