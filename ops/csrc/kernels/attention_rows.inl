// Where attention gets a block of 64 keys or values from: one kv head of a paged cache, in place or gathered into
// scratch.

constexpr int kKeys = static_cast<int>(kAttentionBlock);
// Register tiles of the weighted values: vectors times 16-lane columns, of which a pass takes kColumns dims of floats, or
// one block of codes. Tiles have the best number of vectors, the last at most kMost*.
constexpr bool kManyRegisters = kRegisters == 32;
constexpr int kSumRows = kManyRegisters ? 6 : 3, kMostSums = kManyRegisters ? 6 : 4;
constexpr int kCodeRows = kWidth == 16 ? 6 : 3, kMostCodes = kWidth == 8 ? 4 : kCodeRows;
constexpr int64_t kColumns = kWidth == 16 ? 64 : 32;

// Keys [begin, end) of a block that a vector sees.
struct Range {
  int begin, end;
  bool empty() const { return begin >= end; }
};

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
static void widen_row(const T* row, int64_t dim, float* out) {
  int64_t d = 0;
  for (; d + 16 <= dim; d += 16) store16(out + d, load16(row + d));
  if (d < dim) store16(out + d, load16(row + d, dim - d));
}

// The codes of a packed row as floats, in the order that `weigh_codes` takes them in: of tq4 the lower nibbles of a block
// come before the upper ones.
static void widen_codes(const uint8_t* row, const KVCache& cache, float* out) {
  for (int64_t at = 0; at < cache.width; at += 32, row += kv::codecs[cache.codec].bytes) {
    f32x16 v[2];
    if (cache.codec == kv::Q8_0)
      take(reinterpret_cast<const int8_t*>(row + 2), v);
    else
      take(reinterpret_cast<const nibble_pair*>(row + 2), v);
    store16(out + at, v[0]);
    store16(out + at + 16, v[1]);
  }
}

// One block of keys or values as the loops want it: rows as they lie in the cache, or f32 rows of a multiple of 16
// elements.
struct Block {
  const void* data;
  int64_t stride;  // bytes
  bool in_place;
};

// The block that is read after the present one. It is asked for bit by bit, in its order, while that one is multiplied:
// requests for all of it at once would be answered one after the other, with nothing else done meanwhile. (What packed
// keys leave to ask for is little, and goes at once.)
struct Ahead {
  const char* rows;
  int64_t each;  // bytes to ask for with each key; none: 0

  DASLLAMA_INLINE void with_keys(int begin, int end) const {
    if (each)
      for (int64_t i = (begin * each + 63) & -64; i < end * each; i += 64) __builtin_prefetch(rows + i);
  }

  // The share of a pass over the keys that takes columns [first, first + n) of D.
  Ahead share(int64_t first, int64_t n, int64_t D) const {
    if (!each) return *this;  // divisions take time
    return {rows + kKeys * each * first / D, each * n / D};
  }
};

// The cache of one kv head of a sequence, keys or values.
struct Rows {
  const KVCache& cache;
  const int32_t* pages;
  int64_t kv_head;

  const char* at(int64_t position) const { return cache.row(pages[position / cache.R], kv_head, position % cache.R); }
  bool contiguous() const { return cache.R % kKeys == 0; }

  // f(j, row) for the keys j of the block at position `start` that are set in `seen`.
  template <class F>
  void each(int64_t start, uint64_t seen, const F& f) const {
    const char* rows = contiguous() ? at(start) : nullptr;  // divisions take longer than a row
    for (int j = 0; j < kKeys; j++)
      if (seen >> j & 1) f(j, reinterpret_cast<const uint8_t*>(rows ? rows + j * cache.row_bytes : at(start + j)));
  }

  // Whether the loops take blocks as they lie. A single tile widens what it reads as it goes, for more it is worth doing
  // once.
  bool serve(int64_t vectors) const {
    const bool whole = cache.packed() || cache.D % 16 == 0;
    return contiguous() && whole && (cache.codec == kv::F32 || vectors <= (cache.packed() ? kMostCodes : kMostSums));
  }

  // Rows that are set in `seen`: in place or as floats, which are the codes without their scales if the cache packs.
  Block fetch(int64_t start, uint64_t seen, int64_t vectors, float* scratch) const {
    if (serve(vectors)) return {at(start), cache.row_bytes, true};
    const int64_t stride = cache.width + kAttentionPad;
    each(start, seen, [&](int j, const uint8_t* row) {
      float* to = scratch + j * stride;
      if (cache.packed()) return widen_codes(row, cache, to);
      if (cache.codec == kv::F16) return widen_row(reinterpret_cast<const f16*>(row), cache.D, to);
      widen_row(reinterpret_cast<const float*>(row), cache.D, to);
    });
    return {scratch, stride * static_cast<int64_t>(sizeof(float)), false};
  }

  // Rows that are set in `seen` as they are packed.
  Block fetch_packed(int64_t start, uint64_t seen, void* scratch) const {
    if (contiguous()) return {at(start), cache.row_bytes, true};
    each(start, seen, [&](int j, const uint8_t* row) {
      std::memcpy(static_cast<uint8_t*>(scratch) + j * cache.row_bytes, row, static_cast<size_t>(cache.row_bytes));
    });
    return {scratch, cache.row_bytes, true};
  }

  // The block of positions [start, end) if a single tile is to read it as it lies: in decode each key is read once, from
  // far away. More tiles have other work meanwhile.
  Ahead ahead(int64_t start, int64_t end, int64_t vectors) const {
    if (start >= end || vectors > kMostSums || !serve(vectors) || pages[start / cache.R] < 0) return {nullptr, 0};
    return {at(start), cache.row_bytes};
  }
};
