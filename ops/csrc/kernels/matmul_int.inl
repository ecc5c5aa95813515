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
#if defined(DASLLAMA_ISA_AVX2)
#include "matmul_int_words.inl"
#endif
#include "matmul_int_many.inl"

constexpr int kFewRows = 4;  // up to so many rows of x the weights are not kept in a panel

template <class Source, int M>
static DASLLAMA_NOINLINE void matmul_few(const IntMatmul& p, int64_t n_begin, int64_t n_end, int64_t m) {
#if defined(DASLLAMA_ISA_AVX2)
  typedef typename Source::Type Type;
  if constexpr (InWords<Type>::kServes)
    if (rows_serve<Type, M>(p.K)) return few_rows256<Type, M>(p, n_begin, n_end, m);
#endif
  for (int64_t n = n_begin; n < n_end; n += kLanes) {
    const Strip strip(p.w, p.row_bytes, n, p.N);
    Floats acc[M];
    for (int i = 0; i < M; i++) acc[i] = zero_floats();
    if constexpr (Source::kBlock == 32)
      few_strip32<Source, M>(p, strip, m, acc);
    else
      few_strip256<Source, M>(p, strip, m, acc);
    for (int i = 0; i < M; i++) store_outputs(p, m + i, n, acc[i]);
  }
}

// Types of which AVX-512 leaves a single row of x to AVX2: strips of eight weight rows, those that are read and those that
// are asked for, stay in the first-level cache where sixteen do not, and weights come from memory faster than arithmetic
// of twice the width gains. Both keep what `x` holds, and give the same bits.
#if defined(DASLLAMA_ISA_AVX512)
template <class T, class... Types>
constexpr bool kIsOneOf = (std::is_same_v<T, Types> || ...);
template <class T>
constexpr bool kRowByAvx2 = kIsOneOf<T, FastQ4_0, FastQ4_1, FastQ8_0, FastMXFP4, FastNVFP4>;
#else
template <class T>
constexpr bool kRowByAvx2 = false;
#endif

template <class Source>
static void matmul_source(const IntMatmul& p, int64_t n_begin, int64_t n_end, int64_t m_begin, int64_t m_end) {
  switch (m_end - m_begin) {
    case 1:
      if constexpr (kRowByAvx2<typename Source::Type>)
        return int_kernels_avx2.matmul(p, n_begin, n_end, m_begin, m_end);
      else
        return matmul_few<Source, 1>(p, n_begin, n_end, m_begin);
    case 2: return matmul_few<Source, 2>(p, n_begin, n_end, m_begin);
    case 3: return matmul_few<Source, 3>(p, n_begin, n_end, m_begin);
    case kFewRows: return matmul_few<Source, kFewRows>(p, n_begin, n_end, m_begin);
  }
  if constexpr (Source::kBlock == 32)
    matmul_many<Panel32<Source>>(p, n_begin, n_end, m_begin, m_end);
  else
    matmul_many<Panel256<Source>>(p, n_begin, n_end, m_begin, m_end);
}

// Calls f with the source type that serves qtype, by a null pointer to it.
template <class F>
static void with_source(int qtype, const F& f) {
  switch (qtype) {
#define DASLLAMA_SOURCE(name, Source) \
  case types::name:                   \
    return f(static_cast<Source<Fast##name>*>(nullptr));
    DASLLAMA_SOURCE(Q4_0, Packed32)
    DASLLAMA_SOURCE(Q4_1, Packed32)
    DASLLAMA_SOURCE(Q5_0, Packed32)
    DASLLAMA_SOURCE(Q5_1, Packed32)
    DASLLAMA_SOURCE(Q8_0, Packed32)
    DASLLAMA_SOURCE(IQ4_NL, Packed32)
    DASLLAMA_SOURCE(MXFP4, Packed32)
    DASLLAMA_SOURCE(Q1_0, Decoded32)
    DASLLAMA_SOURCE(Q2_0, Decoded32)
    DASLLAMA_SOURCE(NVFP4, Decoded32)
    DASLLAMA_SOURCE(Q2_K, Packed256)
    DASLLAMA_SOURCE(Q3_K, Packed256)
    DASLLAMA_SOURCE(Q4_K, Packed256)
    DASLLAMA_SOURCE(Q5_K, Packed256)
    DASLLAMA_SOURCE(Q6_K, Packed256)
    DASLLAMA_SOURCE(IQ4_XS, Packed256)
    DASLLAMA_SOURCE(TQ2_0, Packed256)
    DASLLAMA_SOURCE(IQ1_S, Decoded256)
    DASLLAMA_SOURCE(IQ1_M, Decoded256)
    DASLLAMA_SOURCE(IQ2_XXS, Decoded256)
    DASLLAMA_SOURCE(IQ2_XS, Decoded256)
    DASLLAMA_SOURCE(IQ2_S, Decoded256)
    DASLLAMA_SOURCE(IQ3_XXS, Decoded256)
    DASLLAMA_SOURCE(IQ3_S, Decoded256)
    DASLLAMA_SOURCE(TQ1_0, Decoded256)
#undef DASLLAMA_SOURCE
  }
}

static IntTraits int_traits(int qtype) {
  IntTraits traits = {};
  with_source(qtype, [&](auto* source) {
    typedef std::remove_pointer_t<decltype(source)> Source;
    traits = {16 * Source::kParts, tile_bias(Source::kMax, Source::kBias), kLanes * kTileStrips};
  });
  return traits;
}

static void matmul_int(const IntMatmul& p, int64_t n_begin, int64_t n_end, int64_t m_begin, int64_t m_end) {
  with_source(p.qtype, [&](auto* source) {
    matmul_source<std::remove_pointer_t<decltype(source)>>(p, n_begin, n_end, m_begin, m_end);
  });
}
