// Decoding as kernels: packed rows to f32, and rows of a packed table chosen by ids. Types are decoded in ../blocks.h.

static void dequantize(int qtype, const uint8_t* src, int64_t n, float* y) { dequantize_row(qtype, src, n, y); }

static void embedding(int qtype, const uint8_t* table, int64_t row_bytes, const int64_t* ids, float scale, int64_t C,
                      float* y, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; row++) {
    float* out = y + row * C;
    dequantize_row(qtype, table + ids[row] * row_bytes, C, out);
    if (scale != 1.0f)
      for (int64_t c = 0; c < C; c++) out[c] *= scale;
  }
}
