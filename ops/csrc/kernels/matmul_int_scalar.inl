// The integer matmul in plain C++, for every packed type: a weight block is expanded once and multiplied with all rows of
// x. It is the ladder's first rung, and the word on what the faster ones must give, to the bit.

constexpr int64_t kScalarRows = 64;  // rows of x whose sums are kept while a weight row passes by

template <int n>
static DASLLAMA_INLINE int32_t dot_bytes(const int8_t* a, const int8_t* b) {
  int32_t sum = 0;
  for (int i = 0; i < n; i++) sum += static_cast<int32_t>(a[i]) * b[i];
  return sum;
}

template <int qtype>
static void scalar_row(const IntMatmul& p, const uint8_t* w, int64_t first, int64_t rows, float* acc) {
  if constexpr (type_info(qtype).lattice == types::Q8_K) {
    const int64_t blocks = p.K / 256;
    for (int64_t b = 0; b < blocks; b++) {
      Block256 block;
      expand<qtype>(w, b, block);
      for (int64_t m = 0; m < rows; m++) {
        const int64_t at = (first + m) * blocks + b;
        const int8_t* x = p.x.q + at * 256;
        int32_t isum = 0, low = 0;
        for (int g = 0; g < 16; g++) {
          isum += block.scale[g] * dot_bytes<16>(block.q + 16 * g, x + 16 * g);
          if (has_min(qtype)) low += block.min[g] * p.x.sums[at * 16 + g];
        }
        acc[m] = __builtin_fmaf(static_cast<float>(isum), block.d * p.x.d[at], acc[m]);
        if (has_min(qtype)) acc[m] = __builtin_fmaf(-static_cast<float>(low), block.dmin * p.x.d[at], acc[m]);
      }
    }
  } else {
    const int64_t blocks = p.K / 32;
    for (int64_t b = 0; b < blocks; b++) {
      Block32 block;
      expand<qtype>(w, b, block);
      for (int64_t m = 0; m < rows; m++) {
        const int64_t at = (first + m) * blocks + b;
        const int8_t* x = p.x.q + at * 32;
        const float x_d = p.x.d[at];
        if constexpr (qtype == types::NVFP4) {  // scales are per 16
          for (int half = 0; half < 2; half++) {
            const int32_t isum = dot_bytes<16>(block.q + 16 * half, x + 16 * half);
            acc[m] = __builtin_fmaf(static_cast<float>(isum), block.d[half] * x_d, acc[m]);
          }
        } else {
          acc[m] = __builtin_fmaf(static_cast<float>(dot_bytes<32>(block.q, x)), block.d[0] * x_d, acc[m]);
          if (type_info(qtype).lattice == types::Q8_1) acc[m] = __builtin_fmaf(block.m, p.x.s[at], acc[m]);
        }
      }
    }
  }
}

template <int qtype>
static void scalar_rows(const IntMatmul& p, int64_t n_begin, int64_t n_end, int64_t m_begin, int64_t m_end) {
  for (int64_t n = n_begin; n < n_end; n++)
    for (int64_t first = m_begin; first < m_end; first += kScalarRows) {
      const int64_t rows = m_end - first < kScalarRows ? m_end - first : kScalarRows;
      float acc[kScalarRows] = {};
      scalar_row<qtype>(p, p.w + n * p.row_bytes, first, rows, acc);
      for (int64_t m = 0; m < rows; m++) p.y_row(first + m)[n] = p.bias ? acc[m] + p.bias[n] : acc[m];
    }
}

static void matmul_int(const IntMatmul& p, int64_t n_begin, int64_t n_end, int64_t m_begin, int64_t m_end) {
  switch (p.qtype) {
#define DASLLAMA_CASE(name) \
  case types::name:         \
    return scalar_rows<types::name>(p, n_begin, n_end, m_begin, m_end);
    DASLLAMA_PACKED_TYPES(DASLLAMA_CASE)
#undef DASLLAMA_CASE
  }
}

static IntTraits int_traits(int) { return {16, 0, 1}; }
