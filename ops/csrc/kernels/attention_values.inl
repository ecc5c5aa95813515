// The second half of attention's arithmetic: acc of each vector += its weights times a block of values, key by key. A
// packed value is a code times the scale of 32 columns; the scale goes to the weight, which is rounded once for it.

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

// acc of Q vectors += weights of `keys` times columns [0, 16 * S) of their values, key by key; stride: bytes.
template <int Q, int S, class T>
DASLLAMA_INLINE void weigh(const float* weights, const T* v, int64_t stride, Range keys, float* acc,
                           int64_t acc_stride, Ahead ahead) {
  f32x16 sums[Q][S];
#pragma GCC unroll 6
  for (int i = 0; i < Q; i++)
#pragma GCC unroll 4
    for (int c = 0; c < S; c++) sums[i][c] = load16(acc + i * acc_stride + 16 * c);
  for (int j = keys.begin; j < keys.end; j++) {
    ahead.with_keys(j, j + 1);
    f32x16 values[S];
    take(reinterpret_cast<const T*>(reinterpret_cast<const char*>(v) + j * stride), values);
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

// add(rows, r, keys) for tiles of vectors r .. r + rows - 1, rows a constant. Keys that all vectors of a tile see go
// together; what only some see goes vector by vector, before and after.
template <int kRows, int kMost, class Add>
DASLLAMA_INLINE void by_tiles(const Range* ranges, int64_t vectors, const Add& add) {
  constexpr std::integral_constant<int, 1> one;
  for (int64_t i = 0; i < vectors;) {
    const int64_t n = next_tile(vectors - i, kRows, kMost);
    Range common = {0, kKeys};
    for (int64_t r = i; r < i + n; r++)
      common = {ranges[r].begin > common.begin ? ranges[r].begin : common.begin,
                ranges[r].end < common.end ? ranges[r].end : common.end};
    if (common.empty()) {
      for (int64_t r = i; r < i + n; r++) add(one, r, ranges[r]);
    } else {
      for (int64_t r = i; r < i + n; r++)
        if (ranges[r].begin < common.begin) add(one, r, {ranges[r].begin, common.begin});
      with_rows<kMost>(n, [&](auto rows) { add(rows, i, common); });
      for (int64_t r = i; r < i + n; r++)
        if (common.end < ranges[r].end) add(one, r, {common.end, ranges[r].end});
    }
    i += n;
  }
}

// Columns [0, D) of floats.
template <class T>
static void weigh_floats(const float* weights, const T* v, int64_t stride, int64_t D, const Range* ranges,
                         int64_t vectors, float* acc, Ahead ahead) {
  for (int64_t first = 0; first < D; first += kColumns) {
    const int64_t end = first + kColumns < D ? first + kColumns : D;
    by_tiles<kSumRows, kMostSums>(ranges, vectors, [&](auto rows, int64_t r, Range keys) {
      constexpr int Q = rows, S = kWidth == 16 ? 4 : kWidth == 4 || Q == 4 ? 1 : 2;
      const float* w = weights + r * kKeys;
      float* to = acc + r * D;
      int64_t d = first;
      for (; d + 16 * S <= end; d += 16 * S)
        weigh<Q, S>(w, v + d, stride, keys, to + d, D, ahead.share(d, 16 * S, D));
      for (; d < end; d += 16) weigh<Q, 1>(w, v + d, stride, keys, to + d, D, ahead.share(d, 16, D));
    });
  }
}

// scales[b][j]: of block b of the value of key j, for the keys in `seen`.
static void value_scales(const Rows& values, int64_t start, uint64_t seen, float* scales) {
  const KVCache& cache = values.cache;
  const uint8_t* rows[kKeys] = {};
  values.each(start, seen, [&](int j, const uint8_t* row) { rows[j] = row; });
  for (int64_t at = 0; at < cache.row_bytes; at += kv::codecs[cache.codec].bytes, scales += kKeys) {
    f16 d[kKeys];
    for (int j = 0; j < kKeys; j++) d[j].bits = rows[j] ? load_u16(rows[j] + at) : 0;
    for (int j = 0; j < kKeys; j += 16) store16(scales + j, load16(d + j));
  }
}

// All columns of a block of values of which v holds the codes. scaled: memory for a row of weights for each vector.
static void weigh_codes(const float* weights, const Block& v, const KVCache& cache, const float* scales,
                        const Range* ranges, int64_t vectors, float* acc, float* scaled, Ahead ahead) {
  const int64_t D = cache.width, bytes = kv::codecs[cache.codec].bytes;
  for (int64_t b = 0; b < D / 32; b++, scales += kKeys) {
    for (int64_t i = 0; i < vectors; i++)
      for (int j = 0; j < kKeys; j += 16)
        store16(scaled + i * kKeys + j, load16(weights + i * kKeys + j) * load16(scales + j));
    const char* packed = static_cast<const char*>(v.data) + b * bytes + 2;
    const Ahead next = ahead.share(32 * b, 32, D), first = next.share(0, 1, 2), second = next.share(1, 1, 2);
    by_tiles<kCodeRows, kMostCodes>(ranges, vectors, [&](auto rows, int64_t r, Range keys) {
      const auto add = [&](const auto* block) {
        const float* w = scaled + r * kKeys;
        float* to = acc + r * D + 32 * b;
        if constexpr (rows <= kCodeRows) {
          weigh<rows, 2>(w, block, v.stride, keys, to, D, next);
        } else {
          weigh<rows, 1>(w, half_of<0>(block), v.stride, keys, to, D, first);
          weigh<rows, 1>(w, half_of<1>(block), v.stride, keys, to + 16, D, second);
        }
      };
      if (!v.in_place)
        add(static_cast<const float*>(v.data) + 32 * b);
      else if (cache.codec == kv::Q8_0)
        add(reinterpret_cast<const int8_t*>(packed));
      else
        add(reinterpret_cast<const nibble_pair*>(packed));
    });
  }
}
