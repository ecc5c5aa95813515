// Attention of ragged rows over a paged cache, with an online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867).
//
//   s[j] = scale * q . k[j], soft-capped to c tanh(s / c);  out = sum_j exp(s[j]) v[j] / (sum_j exp(s[j]) + exp(sink))
//
// A tile is some consecutive rows of one sequence times the H / G query heads of one kv head: its "vectors", row-major.
// Layouts: caches [P, G, R, D]; scores [vectors, 64]; a state is m, l (running maximum and sum) and acc [Dv] of each
// vector.
//
// The order of every sum is fixed by the keys' absolute positions alone, so a row's bits do not depend on its tile:
// q . k runs in 16 lanes over D and ends in sum16's tree; keys go in blocks of 64 that start at multiples of 64, each
// with one rescale; blocks are gathered in splits of 256, which are merged in ascending order. A key that a row does
// not see takes no part in that row's arithmetic, whatever it holds. Head sizes are padded to 16 lanes with zeros in
// scratch.

constexpr int kKeys = static_cast<int>(kAttentionBlock);
// Register tiles. Scores: vectors times 4 keys (2 keys for 4 vectors where there are 16 registers). Weighted values:
// vectors times 16-lane columns, of which a pass takes kColumns dims. Tiles have the best number of vectors, the last
// at most kMost*.
constexpr bool kManyRegisters = kRegisters == 32;
constexpr int kScoreRows = kManyRegisters ? 4 : 3, kMostScores = 4;
constexpr int kSumRows = kManyRegisters ? 6 : 3, kMostSums = kManyRegisters ? 6 : 4;
constexpr int64_t kColumns = kWidth == 16 ? 64 : 32;

// Keys [begin, end) of a block that a vector sees.
struct Range {
  int begin, end;
  bool empty() const { return begin >= end; }
};

struct State {
  float *m, *l, *acc;  // [vectors], [vectors], [vectors, padded Dv]
  State(float* p, int64_t vectors) : m(p), l(p + vectors), acc(p + 2 * vectors) {}
};

// One block of keys or values as the loops want it: rows of a multiple of 16 elements.
struct Block {
  const void* data;
  int64_t stride;
  bool half;
};

// Vectors of the next tile when `left` are left: `rows` is the best number, `most` the largest.
static int64_t next_tile(int64_t left, int64_t rows, int64_t most) {
  return left <= most ? left : left < 2 * rows ? (left + 1) / 2 : rows;
}

// f(Q) with n, from 1 to Most, as a constant Q.
template <int Most, class F>
DASLLAMA_INLINE void with_rows(int64_t n, const F& f) {
  if constexpr (Most > 1)
    if (n < Most) return with_rows<Most - 1>(n, f);
  f(std::integral_constant<int, Most>());
}

template <class T>
static void widen_row(const T* row, int64_t dim, float* out) {
  int64_t d = 0;
  for (; d + 16 <= dim; d += 16) store16(out + d, load16(row + d));
  if (d < dim) store16(out + d, load16(row + d, dim - d));
}

// The cache of one kv head of a sequence, keys or values.
struct Rows {
  const void* cache;
  bool half;
  int64_t page_stride, dim;
  const int32_t* pages;
  int64_t R, kv_head;

  int64_t size() const { return half ? sizeof(f16) : sizeof(float); }
  const char* at(int64_t position) const {
    const int64_t page = pages[position / R];
    return static_cast<const char*>(cache) + (page * page_stride + (kv_head * R + position % R) * dim) * size();
  }
  // Whether the loops take blocks as they lie. A single tile reads halves so, more are worth converting the block once.
  bool serve(int64_t vectors) const { return R % kKeys == 0 && dim % 16 == 0 && (!half || vectors <= kMostSums); }

  // Keys of the block at position `start` that are set in `seen`.
  Block fetch(int64_t start, uint64_t seen, int64_t vectors, float* scratch) const {
    if (serve(vectors)) return {at(start), dim, half};
    const int64_t stride = round16(dim) + kAttentionPad;
    for (int j = 0; j < kKeys; j++) {
      if (!(seen >> j & 1)) continue;
      if (half)
        widen_row(reinterpret_cast<const f16*>(at(start + j)), dim, scratch + j * stride);
      else
        widen_row(reinterpret_cast<const float*>(at(start + j)), dim, scratch + j * stride);
    }
    return {scratch, stride, false};
  }

  // Asks the memory for positions [start, end) of a block, if a single tile is to read them as they lie: in decode each is
  // read once, from far away. More tiles have other work meanwhile.
  void ask_for(int64_t start, int64_t end, int64_t vectors) const {
    if (start >= end || vectors > kMostSums || !serve(vectors) || pages[start / R] < 0) return;
    const int64_t n = end - start < kKeys ? end - start : kKeys;
    const char* rows = at(start);
    for (int64_t i = 0; i < n * dim * size(); i += 64) __builtin_prefetch(rows + i);
  }
};

// ---- scores ---------------------------------------------------------------------------------------------------------

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

// The smallest range that holds those of n vectors; empty if all are.
static Range hull(const Range* ranges, int64_t n) {
  Range all = {kKeys, 0};
  for (int64_t i = 0; i < n; i++)
    if (!ranges[i].empty())
      all = {ranges[i].begin < all.begin ? ranges[i].begin : all.begin,
             ranges[i].end > all.end ? ranges[i].end : all.end};
  return all;
}

template <class T>
static void score_block(const float* q, const T* k, int64_t stride, int64_t D, const Range* ranges, int64_t vectors,
                        float* scores) {
  // Keys that all tiles visit before the next ones: 16 kB of them stay in the first-level cache.
  const int step = D >= 1024 ? 4 : static_cast<int>(4096 / D & ~3);
  for (int first = 0; first < kKeys; first += step)
    for (int64_t i = 0; i < vectors;) {
      const int64_t n = next_tile(vectors - i, kScoreRows, kMostScores);
      const Range all = hull(ranges + i, n);
      const int begin = all.begin > first ? all.begin : first, end = all.end < first + step ? all.end : first + step;
      with_rows<kMostScores>(n, [&](auto rows) {
        constexpr int Q = rows, K = Q == 4 && !kManyRegisters ? 2 : 4;
        for (int j = begin & -K; j < end; j += K)
          dots<Q, K>(q + i * D, k + j * stride, stride, D, scores + i * kKeys + j);
      });
      i += n;
    }
}

// Turns a vector's raw dot products into exp(s - m), zero outside of `keys`, and updates m and l. Returns the factor
// that the older part of the state shrinks by.
static float soften(const AttentionArgs& a, Range keys, float* scores, float* m, float* l) {
  static const float count[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  f32x16 s[kKeys / 16], top = splat16(-INFINITY);
  for (int b = 0; b < kKeys / 16; b++) {
    s[b] = load16(scores + 16 * b) * a.scale;
    if (a.softcap > 0) s[b] = vtanh(s[b] / splat16(a.softcap)) * a.softcap;
    if (keys.begin > 16 * b || keys.end < 16 * b + 16) {
      const f32x16 key = load16(count), none = splat16(-INFINITY);
      s[b] = select(less(key, splat16(static_cast<float>(keys.end - 16 * b))), s[b], none);
      s[b] = select(less(key, splat16(static_cast<float>(keys.begin - 16 * b))), none, s[b]);
    }
    top = max(top, s[b]);
  }
  const float before = *m, most = max16(top);
  *m = most > before ? most : before;
  f32x16 sums = {};
  for (int b = 0; b < kKeys / 16; b++) {
    s[b] = vexp(s[b] - splat16(*m));
    store16(scores + 16 * b, s[b]);
    sums += s[b];
  }
  const float shrink = *m == before ? 1.0f : exp_one(before - *m);
  *l = *l * shrink + sum16(sums);
  return shrink;
}

// ---- weighted values ------------------------------------------------------------------------------------------------

// acc of Q vectors += weights of `keys` times columns [0, 16 * S) of their values, key by key.
template <int Q, int S, class T>
DASLLAMA_INLINE void weigh(const float* weights, const T* v, int64_t stride, Range keys, float* acc,
                           int64_t acc_stride) {
  f32x16 sums[Q][S];
#pragma GCC unroll 6
  for (int i = 0; i < Q; i++)
#pragma GCC unroll 4
    for (int c = 0; c < S; c++) sums[i][c] = load16(acc + i * acc_stride + 16 * c);
  for (int j = keys.begin; j < keys.end; j++) {
    f32x16 values[S];
#pragma GCC unroll 4
    for (int c = 0; c < S; c++) values[c] = load16(v + j * stride + 16 * c);
#pragma GCC unroll 6
    for (int i = 0; i < Q; i++) {
      const f32x16 w = splat16(weights[i * kKeys + j]);
#pragma GCC unroll 4
      for (int c = 0; c < S; c++) sums[i][c] = fma(w, values[c], sums[i][c]);
    }
  }
#pragma GCC unroll 6
  for (int i = 0; i < Q; i++)
#pragma GCC unroll 4
    for (int c = 0; c < S; c++) store16(acc + i * acc_stride + 16 * c, sums[i][c]);
}

template <class T>
static void weigh_block(const float* weights, const T* v, int64_t stride, int64_t D, const Range* ranges,
                        int64_t vectors, float* acc) {
  for (int64_t first = 0; first < D; first += kColumns) {
    const int64_t end = first + kColumns < D ? first + kColumns : D;
    for (int64_t i = 0; i < vectors;) {
      const int64_t n = next_tile(vectors - i, kSumRows, kMostSums);
      const auto add = [&](auto rows, int64_t r, Range keys) {
        constexpr int Q = rows, S = kWidth == 16 ? 4 : kWidth == 4 || Q == 4 ? 1 : 2;
        int64_t d = first;
        for (; d + 16 * S <= end; d += 16 * S)
          weigh<Q, S>(weights + r * kKeys, v + d, stride, keys, acc + r * D + d, D);
        for (; d < end; d += 16) weigh<Q, 1>(weights + r * kKeys, v + d, stride, keys, acc + r * D + d, D);
      };
      constexpr std::integral_constant<int, 1> one;
      // Keys that all n vectors see go together; what only some see goes vector by vector, before and after.
      Range common = {0, kKeys};
      for (int64_t r = i; r < i + n; r++)
        common = {ranges[r].begin > common.begin ? ranges[r].begin : common.begin,
                  ranges[r].end < common.end ? ranges[r].end : common.end};
      if (common.empty()) {
        for (int64_t r = i; r < i + n; r++) add(one, r, ranges[r]);
      } else {
        for (int64_t r = i; r < i + n; r++)
          if (ranges[r].begin < common.begin) add(one, r, {ranges[r].begin, common.begin});
        with_rows<kMostSums>(n, [&](auto rows) { add(rows, i, common); });
        for (int64_t r = i; r < i + n; r++)
          if (common.end < ranges[r].end) add(one, r, {common.end, ranges[r].end});
      }
      i += n;
    }
  }
}

// ---- a tile ---------------------------------------------------------------------------------------------------------

// The state of one split of 256 keys, from nothing.
static void attention_split(const AttentionArgs& a, AttentionTile tile, int64_t kv_head, int64_t split, float* state,
                            float* scratch) {
  const int64_t group = a.H / a.G, vectors = tile.rows * group, D = round16(a.D), Dv = round16(a.Dv);
  float *q = scratch, *keys = q + vectors * D, *values = keys + kKeys * (D + kAttentionPad);
  float* scores = values + kKeys * (Dv + kAttentionPad);
  Range* ranges = reinterpret_cast<Range*>(scores + vectors * kKeys);
  const State s(state, vectors);
  for (int64_t i = 0; i < vectors; i++) {
    const int64_t row = tile.row + i / group, head = kv_head * group + i % group;
    widen_row(a.q + row * a.q_row + head * a.q_head, a.D, q + i * D);
    s.m[i] = -INFINITY;
    s.l[i] = 0;
  }
  std::memset(s.acc, 0, static_cast<size_t>(vectors * Dv) * sizeof(float));

  const int32_t* pages = a.block_table + static_cast<int64_t>(a.row_seq[tile.row]) * a.B;
  const Rows all_keys = {a.k, a.k_half, a.k_page, a.D, pages, a.R, kv_head};
  const Rows all_values = {a.v, a.v_half, a.v_page, a.Dv, pages, a.R, kv_head};
  const int64_t end = a.row_end[tile.row + tile.rows - 1];
  for (int64_t start = split * kAttentionSplit; start < (split + 1) * kAttentionSplit; start += kKeys) {
    uint64_t seen = 0;
    for (int64_t i = 0; i < vectors; i++) {
      const int64_t row = tile.row + i / group, first = a.row_begin[row] - start, last = a.row_end[row] - start;
      const Range r = {static_cast<int>(first < 0       ? 0
                                        : first > kKeys ? kKeys
                                                        : first),
                       static_cast<int>(last < 0       ? 0
                                        : last > kKeys ? kKeys
                                                       : last)};
      ranges[i] = r;
      if (!r.empty()) seen |= (~uint64_t{0} >> (kKeys - (r.end - r.begin))) << r.begin;
    }
    if (!seen) continue;

    const Block k = all_keys.fetch(start, seen, vectors, keys);
    all_values.ask_for(start, end, vectors);
    if (k.half)
      score_block(q, static_cast<const f16*>(k.data), k.stride, D, ranges, vectors, scores);
    else
      score_block(q, static_cast<const float*>(k.data), k.stride, D, ranges, vectors, scores);

    for (int64_t i = 0; i < vectors; i++) {
      if (ranges[i].empty()) continue;
      const float shrink = soften(a, ranges[i], scores + i * kKeys, s.m + i, s.l + i);
      if (shrink != 1.0f)
        for (int64_t d = 0; d < Dv; d += 16) store16(s.acc + i * Dv + d, load16(s.acc + i * Dv + d) * shrink);
    }

    const Block v = all_values.fetch(start, seen, vectors, values);
    all_keys.ask_for(start + kKeys, end, vectors);
    if (v.half)
      weigh_block(scores, static_cast<const f16*>(v.data), v.stride, Dv, ranges, vectors, s.acc);
    else
      weigh_block(scores, static_cast<const float*>(v.data), v.stride, Dv, ranges, vectors, s.acc);
  }
}

// total <- total and the split that follows it.
static void attention_merge(const AttentionArgs& a, AttentionTile tile, const float* split, float* total) {
  const int64_t vectors = tile.rows * (a.H / a.G), Dv = round16(a.Dv);
  const State t(total, vectors), s(const_cast<float*>(split), vectors);
  for (int64_t i = 0; i < vectors; i++) {
    if (s.l[i] == 0) continue;  // a split of which the row sees nothing
    const float m = s.m[i] > t.m[i] ? s.m[i] : t.m[i];
    const float old = exp_one(t.m[i] - m), add = exp_one(s.m[i] - m);
    t.m[i] = m;
    t.l[i] = t.l[i] * old + s.l[i] * add;
    for (int64_t d = i * Dv; d < (i + 1) * Dv; d += 16)
      store16(t.acc + d, load16(t.acc + d) * old + load16(s.acc + d) * add);
  }
}

// Divides by the sums and writes the tile's part of out [T, H, Dv].
static void attention_finish(const AttentionArgs& a, AttentionTile tile, int64_t kv_head, const float* total) {
  const int64_t group = a.H / a.G, vectors = tile.rows * group, Dv = round16(a.Dv);
  const State t(const_cast<float*>(total), vectors);
  for (int64_t i = 0; i < vectors; i++) {
    const int64_t head = kv_head * group + i % group;
    float* out = a.out + ((tile.row + i / group) * a.H + head) * a.Dv;
    float l = t.l[i], shrink = 1.0f;
    if (l != 0 && a.sinks) {
      const float sink = a.sinks[head], m = sink > t.m[i] ? sink : t.m[i];
      shrink = exp_one(t.m[i] - m);
      l = l * shrink + exp_one(sink - m);
    }
    const float factor = l == 0 ? 0.0f : shrink / l;  // a row that sees nothing yields zeros
    int64_t d = 0;
    for (; d + 16 <= a.Dv; d += 16) store16(out + d, load16(t.acc + i * Dv + d) * factor);
    if (d < a.Dv) store16(out + d, load16(t.acc + i * Dv + d) * factor, a.Dv - d);
  }
}
