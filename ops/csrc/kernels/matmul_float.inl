// The float product: y[m, n] = sum over k of x[m, k] * w[n, k], + bias[n], with f32 weights, f16 or bf16 weights widened
// as they are read, or any other type dequantized to f32 first.
//
// Order of the sum, the same for every M, tile, thread and instruction set: lane k % 16 folds its products in ascending k
// with fused multiply-adds from zero, kRun values of k at a time, and adds up what these runs give; a last group of fewer
// than 16 is filled up with zeros and is a run of its own, and the 16 lanes end in lanes.h's tree. Runs keep a product
// that is far larger than the others, as published models have them, from being rounded with each of thousands behind it.
// Lanes may be parked in memory between blocks of k, and neighbours never matter.
//
// Blocking: kStrip weight rows by kDepth columns are dequantized once and stay in L2 while the rows of x pass by; the
// register tile is kTileM rows of x by kTileN rows of w. Up to kTileM rows of x read the file's floats themselves.

#if defined(DASLLAMA_ISA_AVX512)
constexpr int kTileM = 6, kTileN = 4, kStreamN = 4;
#elif defined(DASLLAMA_ISA_AVX2)
constexpr int kTileM = 3, kTileN = 2, kStreamN = 4;
#elif defined(DASLLAMA_ISA_NEON)
constexpr int kTileM = 2, kTileN = 2, kStreamN = 4;
#else
constexpr int kTileM = 2, kTileN = 2, kStreamN = 2;
#endif
constexpr int64_t kStrip = 48;        // rows of w in scratch
constexpr int64_t kDepth = 1024;      // columns of w in scratch; a multiple of every type's block
constexpr int64_t kRun = 512;         // divides kDepth
constexpr int64_t kScratchStride = kDepth + 16;  // not a power of two, or the rows would share cache sets
constexpr int64_t kParkedRows = 512;  // rows of x whose lanes may be parked
constexpr int64_t kAhead = 8192;      // bytes: rows of a small model are too short for the processor's own prefetch

// Memory that a thread keeps, at the start of a cache line: a load across two lines costs twice.
struct Scratch {
  float* data = nullptr;
  int64_t size = 0;

  ~Scratch() { std::free(data); }
  float* at_least(int64_t floats) {
    if (floats > size) {
      std::free(data);
      size = (floats + 15) / 16 * 16;
      data = static_cast<float*>(std::aligned_alloc(64, static_cast<size_t>(size) * sizeof(float)));
      if (!data) std::abort();  // a kernel may not throw
    }
    return data;
  }
};

// A piece of the product: `columns` weight rows over `depth` values of k, for some rows of x.
template <class W>
struct FloatPiece {
  const float* x;  // first row, first k of the piece
  int64_t x_stride;
  const W* w;
  int64_t w_stride;
  int64_t columns, depth;
  bool first, last;  // whether the piece starts and ends the sum over k
  float* parked;     // lanes [row][kStrip][16] between pieces of one sum; null when there is one piece only
  const float* bias;
  float* y;  // column 0 of the piece, row 0 of all
  int64_t y_stride;
  const int64_t* rows;  // of y; null: m, m + 1, ...
  int64_t m;
};

// Sixteen lanes for each of MR x NR outputs over `depth` values of k, a multiple of 16 that begins a run; they are added to
// lanes[(m * lanes_stride + n) * 16], which is zero if `first`.
template <int MR, int NR, class W>
static DASLLAMA_INLINE void float_tile(const float* x, int64_t x_stride, const W* const* w, int64_t depth, bool first,
                                       float* lanes, int64_t lanes_stride) {
  int64_t k = 0;
  do {
    f32x16 sum[MR][NR] = {};
    for (const int64_t end = std::min(depth, k + kRun); k < end; k += 16) {
      f32x16 b[NR];
#pragma GCC unroll 8
      for (int n = 0; n < NR; n++) {
        b[n] = load16(w[n] + k);
        if (MR == 1 || sizeof(W) == 2) __builtin_prefetch(reinterpret_cast<const char*>(w[n] + k) + kAhead);
      }
#pragma GCC unroll 8
      for (int m = 0; m < MR; m++) {
        const f32x16 a = load16(x + m * x_stride + k);
#pragma GCC unroll 8
        for (int n = 0; n < NR; n++) sum[m][n] = fma(a, b[n], sum[m][n]);
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < MR; m++)
#pragma GCC unroll 8
      for (int n = 0; n < NR; n++) {
        float* to = lanes + (m * lanes_stride + n) * 16;
        store16(to, first ? sum[m][n] : load16(to) + sum[m][n]);
      }
    first = false;
  } while (k < depth);
}

// The last `rest` < 16 values of k, filled up with zeros.
template <int MR, int NR, class W>
static __attribute__((noinline)) void float_tile_rest(const float* x, int64_t x_stride, const W* const* w, int64_t rest,
                                                      float* lanes, int64_t lanes_stride) {
  float x_rest[MR * 16] = {};
  W w_rest[NR][16] = {};
  const W* w_rows[NR];
  for (int m = 0; m < MR; m++) std::memcpy(x_rest + m * 16, x + m * x_stride, rest * sizeof(float));
  for (int n = 0; n < NR; n++) {
    std::memcpy(w_rest[n], w[n], rest * sizeof(W));
    w_rows[n] = w_rest[n];
  }
  float_tile<MR, NR, W>(x_rest, 16, w_rows, 16, false, lanes, lanes_stride);
}

// MR rows of x, from row m of the piece on, against all its columns. A tile that hangs over the last column computes that
// column again and drops it.
template <int MR, class W>
static void float_rows(const FloatPiece<W>& p, int64_t m) {
  constexpr int NR = MR == 1 ? kStreamN : kTileN;
  const float* x = p.x + m * p.x_stride;
  const int64_t rest = p.depth % 16, depth = p.depth - rest;
  for (int64_t n = 0; n < p.columns; n += NR) {
    const W* w[NR];
    for (int i = 0; i < NR; i++) w[i] = p.w + (n + i < p.columns ? n + i : p.columns - 1) * p.w_stride;
    alignas(64) float tile[MR * NR * 16];
    float* lanes = p.parked ? p.parked + (m * kStrip + n) * 16 : tile;
    const int64_t lanes_stride = p.parked ? kStrip : NR;
    float_tile<MR, NR, W>(x, p.x_stride, w, depth, p.first, lanes, lanes_stride);
    if (rest) {
      for (int i = 0; i < NR; i++) w[i] += depth;
      float_tile_rest<MR, NR, W>(x + depth, p.x_stride, w, rest, lanes, lanes_stride);
    }
    if (!p.last) continue;
    constexpr int outputs = MR * NR;
    const auto lanes_of = [&](int i) {
      i = i < outputs ? i : outputs - 1;
      return load16(lanes + (i / NR * lanes_stride + i % NR) * 16);
    };
    float sums[outputs + 3];
    for (int i = 0; i < outputs; i += 4) sum16(lanes_of(i), lanes_of(i + 1), lanes_of(i + 2), lanes_of(i + 3), sums + i);
    for (int row = 0; row < MR; row++)
      for (int i = 0; i < NR && n + i < p.columns; i++) {
        const float sum = sums[row * NR + i];
        const int64_t y_row = p.rows ? p.rows[p.m + m + row] : p.m + m + row;
        p.y[y_row * p.y_stride + n + i] = p.bias ? sum + p.bias[n + i] : sum;
      }
  }
}

template <int MR, class W>
static void float_remaining_rows(const FloatPiece<W>& p, int64_t m, int64_t rows) {
  if (rows == MR) return float_rows<MR, W>(p, m);
  if constexpr (MR > 1) float_remaining_rows<MR - 1, W>(p, m, rows);
}

template <class W>
static void float_piece(const FloatPiece<W>& p, int64_t rows) {
  int64_t m = 0;
  for (; m + kTileM <= rows; m += kTileM) float_rows<kTileM, W>(p, m);
  if (m < rows) float_remaining_rows<kTileM, W>(p, m, rows - m);
}

// Few rows of x: the file's floats are read once, in order, and each group of kTileN or kStreamN rows is used up at once.
template <class W>
static void float_stream(const FloatMatmul& p, int64_t begin, int64_t end) {
  const int64_t w_stride = p.row_bytes / static_cast<int64_t>(sizeof(W));
  float_piece<W>({p.x, p.x_stride, reinterpret_cast<const W*>(p.w) + begin * w_stride, w_stride, end - begin, p.K, true,
                  true, nullptr, p.bias ? p.bias + begin : nullptr, p.y + begin, p.y_stride, p.rows, 0},
                 p.M);
}

// Column k of weight row n, where k is the first of a block: k / K of the row's bytes come before it.
static const uint8_t* row_at(const uint8_t* w, int64_t row_bytes, int64_t K, int64_t n, int64_t k) {
  return w + n * row_bytes + (k ? row_bytes * k / K : 0);
}

static void matmul_float(const FloatMatmul& p, int64_t begin, int64_t end) {
  const bool f32 = p.qtype == types::F32;
  if (p.M <= kTileM) {
    if (f32) return float_stream<float>(p, begin, end);
    if (p.qtype == types::F16) return float_stream<f16>(p, begin, end);
    if (p.qtype == types::BF16) return float_stream<bf16>(p, begin, end);
  }
  static thread_local Scratch scratch, parked;
  const int64_t strip = p.M <= kTileM ? 4 : kStrip;
  const bool park = p.K > kDepth;
  float* const rows = f32 ? nullptr : scratch.at_least(kStrip * kScratchStride);
  float* const lanes = park ? parked.at_least(std::min(p.M, kParkedRows) * kStrip * 16) : nullptr;
  for (int64_t m = 0; m < p.M; m += kParkedRows)
    for (int64_t n = begin; n < end; n += strip)
      for (int64_t k = 0; k < p.K || k == 0; k += kDepth) {
        const int64_t columns = std::min(strip, end - n), depth = std::min(kDepth, p.K - k);
        const float* w = reinterpret_cast<const float*>(p.w + n * p.row_bytes) + k;
        if (!f32) {
          w = rows;
          for (int64_t i = 0; i < columns; i++)
            decode_row(p.qtype, row_at(p.w, p.row_bytes, p.K, n + i, k), depth, rows + i * kScratchStride);
        }
        float_piece<float>({p.x + m * p.x_stride + k, p.x_stride, w, f32 ? p.K : kScratchStride, columns, depth, k == 0,
                            k + depth >= p.K, lanes, p.bias ? p.bias + n : nullptr, p.y + n, p.y_stride, p.rows, m},
                           std::min(kParkedRows, p.M - m));
      }
}

static void round_floats(int qtype, const float* x, float* y, int64_t begin, int64_t end) {
  if (qtype == types::F16) {
    int64_t i = begin;
    for (; i + 16 <= end; i += 16) {
      f16 half[16];
      store16(half, load16(x + i));
      store16(y + i, load16(half));
    }
    for (; i < end; i++) y[i] = f16_to_f32(f32_to_f16(x[i]));
  } else if (qtype == types::BF16) {
    for (int64_t i = begin; i < end; i++) y[i] = bf16_to_f32(f32_to_bf16(x[i]));
  } else {
    std::copy(x + begin, x + end, y + begin);
  }
}
