// The gradient of the float product with respect to x: dx[m, k] = sum over n of grad[m, n] * w[n, k].
//
// Order of the sum, the same for every M, tile, thread and instruction set: one accumulator per output, from zero, in
// ascending n with fused multiply-adds. So dx itself holds the unfinished sums between blocks of n.
//
// Blocking: kBackRows weight rows by kBackWidth columns are dequantized and stay in L2 while all rows of grad pass by; the
// register tile is kTileM rows by kTileN * 16 columns of dx. Threads own columns.

constexpr int64_t kBackRows = 128;
constexpr int64_t kBackWidth = 256;               // a multiple of every type's block and of a tile
constexpr int64_t kBackStride = kBackWidth + 16;  // not a power of two, or the rows would share cache sets

// MR x (NR * 16) outputs over `rows` weight rows; sums starts as zero if `first`.
template <int MR, int NR>
static DASLLAMA_INLINE void backward_tile(const float* grad, int64_t grad_stride, const float* w, int64_t rows, bool first,
                                          float* sums, int64_t sums_stride) {
  f32x16 sum[MR][NR];
#pragma GCC unroll 8
  for (int m = 0; m < MR; m++)
#pragma GCC unroll 8
    for (int i = 0; i < NR; i++) sum[m][i] = first ? f32x16{} : load16(sums + m * sums_stride + i * 16);
  for (int64_t n = 0; n < rows; n++) {
    f32x16 b[NR];
#pragma GCC unroll 8
    for (int i = 0; i < NR; i++) b[i] = load16(w + n * kBackStride + i * 16);
#pragma GCC unroll 8
    for (int m = 0; m < MR; m++) {
      const f32x16 a = splat16(grad[m * grad_stride + n]);
#pragma GCC unroll 8
      for (int i = 0; i < NR; i++) sum[m][i] = fma(a, b[i], sum[m][i]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < MR; m++)
#pragma GCC unroll 8
    for (int i = 0; i < NR; i++) store16(sums + m * sums_stride + i * 16, sum[m][i]);
}

// `count` <= MR rows of dx, `width` columns. The last columns of a strip, fewer than a tile, are summed beside dx.
template <int MR>
static void backward_rows(int64_t count, const float* grad, int64_t grad_stride, const float* w, int64_t rows, bool first,
                          float* dx, int64_t dx_stride, int64_t width) {
  if constexpr (MR > 1)
    if (count < MR) return backward_rows<MR - 1>(count, grad, grad_stride, w, rows, first, dx, dx_stride, width);
  constexpr int64_t columns = kTileN * 16;
  for (int64_t k = 0; k < width; k += columns) {
    if (width - k >= columns) {
      backward_tile<MR, kTileN>(grad, grad_stride, w + k, rows, first, dx + k, dx_stride);
      continue;
    }
    alignas(64) float sums[MR * columns] = {};
    const size_t bytes = static_cast<size_t>(width - k) * sizeof(float);
    if (!first)
      for (int m = 0; m < MR; m++) std::memcpy(sums + m * columns, dx + m * dx_stride + k, bytes);
    backward_tile<MR, kTileN>(grad, grad_stride, w + k, rows, first, sums, columns);
    for (int m = 0; m < MR; m++) std::memcpy(dx + m * dx_stride + k, sums + m * columns, bytes);
  }
}

static void matmul_float_backward(const FloatMatmulBackward& p, int64_t begin, int64_t end) {
  static thread_local Scratch scratch;
  float* const w = scratch.at_least(kBackRows * kBackStride);
  for (int64_t k = begin; k < end; k += kBackWidth) {
    const int64_t width = std::min(kBackWidth, end - k);
    for (int64_t n = 0; n < p.N || n == 0; n += kBackRows) {
      const int64_t rows = std::min(kBackRows, p.N - n);
      for (int64_t i = 0; i < rows; i++)
        decode_row(p.qtype, row_at(p.w, p.row_bytes, p.K, n + i, k), width, w + i * kBackStride);
      for (int64_t m = 0; m < p.M; m += kTileM)
        backward_rows<kTileM>(std::min<int64_t>(kTileM, p.M - m), p.grad + m * p.N + n, p.N, w, rows, n == 0,
                              p.dx + m * p.K + k, p.K, width);
    }
  }
}
