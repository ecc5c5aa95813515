// The integer matmul in vectors: which source and which of the two ways serve a call. Layouts and the reasons for them
// are in sources_simd.h, matmul_int_few.inl and matmul_int_many.inl; the arithmetic in ops/quant_linear.py.

// Lanes of weight rows n .. n + kLanes - 1, + bias, to row m of y.
static DASLLAMA_INLINE void store_outputs(const IntMatmul& p, int64_t m, int64_t n, Floats acc) {
  float* y = p.y_row(m) + n;
  if (n + kLanes <= p.N) {
    if (p.bias) acc = add(acc, load_floats(p.bias + n));
    store_floats(y, acc);
    return;
  }
  alignas(64) float lanes[kLanes];
  store_floats(lanes, acc);
  for (int64_t i = 0; n + i < p.N; i++) y[i] = p.bias ? lanes[i] + p.bias[n + i] : lanes[i];
}

#include "matmul_int_few.inl"
#include "matmul_int_many.inl"

constexpr int kFewRows = 4;  // up to so many rows of x the weights are not kept in a panel

template <class Source, int M>
static DASLLAMA_NOINLINE void matmul_few(const IntMatmul& p, typename Source::Expand expand, int64_t n_begin, int64_t n_end,
                                         int64_t m) {
  for (int64_t n = n_begin; n < n_end; n += kLanes) {
    const Strip strip(p.w, p.row_bytes, n, p.N);
    Floats acc[M];
    for (int i = 0; i < M; i++) acc[i] = zero_floats();
    if constexpr (Source::kBlock == 32)
      few_strip32<Source, M>(p, strip, expand, m, acc);
    else
      few_strip256<Source, M>(p, strip, expand, m, acc);
    for (int i = 0; i < M; i++) store_outputs(p, m + i, n, acc[i]);
  }
}

template <class Source>
static void matmul_source(const IntMatmul& p, typename Source::Expand expand, int64_t n_begin, int64_t n_end, int64_t m_begin,
                          int64_t m_end) {
  switch (m_end - m_begin) {
    case 1: return matmul_few<Source, 1>(p, expand, n_begin, n_end, m_begin);
    case 2: return matmul_few<Source, 2>(p, expand, n_begin, n_end, m_begin);
    case 3: return matmul_few<Source, 3>(p, expand, n_begin, n_end, m_begin);
    case kFewRows: return matmul_few<Source, kFewRows>(p, expand, n_begin, n_end, m_begin);
  }
  if constexpr (Source::kBlock == 32)
    matmul_many<Panel32<Source>>(p, expand, n_begin, n_end, m_begin, m_end);
  else
    matmul_many<Panel256<Source>>(p, expand, n_begin, n_end, m_begin, m_end);
}

// Calls f with the source type that serves qtype, by a null pointer to it, and the function that expands its blocks.
template <class F>
static void with_source(int qtype, const F& f) {
  switch (qtype) {
#define DASLLAMA_PACKED(name, block) \
  case types::name:                  \
    return f(static_cast<Packed##block<Fast##name>*>(nullptr), Nothing());
    DASLLAMA_PACKED(Q4_0, 32)
    DASLLAMA_PACKED(Q4_1, 32)
    DASLLAMA_PACKED(Q5_0, 32)
    DASLLAMA_PACKED(Q5_1, 32)
    DASLLAMA_PACKED(Q8_0, 32)
    DASLLAMA_PACKED(IQ4_NL, 32)
    DASLLAMA_PACKED(MXFP4, 32)
    DASLLAMA_PACKED(Q4_K, 256)
    DASLLAMA_PACKED(Q5_K, 256)
    DASLLAMA_PACKED(Q6_K, 256)
    DASLLAMA_PACKED(IQ4_XS, 256)
#undef DASLLAMA_PACKED
#define DASLLAMA_EXPANDED(name, source, block) \
  case types::name:                            \
    return f(static_cast<source*>(nullptr), static_cast<Expand##block>(expand<types::name>));
    DASLLAMA_EXPANDED(Q1_0, Expanded32<32>, 32)
    DASLLAMA_EXPANDED(Q2_0, Expanded32<32>, 32)
    DASLLAMA_EXPANDED(NVFP4, Expanded32<16>, 32)
    DASLLAMA_EXPANDED(Q2_K, Expanded256<true>, 256)
    DASLLAMA_EXPANDED(Q3_K, Expanded256<false>, 256)
    DASLLAMA_EXPANDED(IQ1_S, Expanded256<false>, 256)
    DASLLAMA_EXPANDED(IQ1_M, Expanded256<false>, 256)
    DASLLAMA_EXPANDED(IQ2_XXS, Expanded256<false>, 256)
    DASLLAMA_EXPANDED(IQ2_XS, Expanded256<false>, 256)
    DASLLAMA_EXPANDED(IQ2_S, Expanded256<false>, 256)
    DASLLAMA_EXPANDED(IQ3_XXS, Expanded256<false>, 256)
    DASLLAMA_EXPANDED(IQ3_S, Expanded256<false>, 256)
    DASLLAMA_EXPANDED(TQ1_0, Expanded256<false>, 256)
    DASLLAMA_EXPANDED(TQ2_0, Expanded256<false>, 256)
#undef DASLLAMA_EXPANDED
  }
}

static IntTraits int_traits(int qtype) {
  IntTraits traits = {};
  with_source(qtype, [&](auto* source, auto) {
    typedef std::remove_pointer_t<decltype(source)> Source;
    traits = {16 * Source::kParts, Source::kBias, kLanes * kTileStrips};
  });
  return traits;
}

static void matmul_int(const IntMatmul& p, int64_t n_begin, int64_t n_end, int64_t m_begin, int64_t m_end) {
  with_source(p.qtype, [&](auto* source, auto expand) {
    matmul_source<std::remove_pointer_t<decltype(source)>>(p, expand, n_begin, n_end, m_begin, m_end);
  });
}
