// Packed rows to f32 in vectors, for the types that blocks_simd.h unpacks; all others through ../blocks.h, whose bits these
// are too: the same products of the same integers and scales.

#if !defined(DASLLAMA_ISA_SCALAR)

// Sixteen unpacked weights of type T, stored as blocks_simd.h says: y = d * weight, then + m or - m, or neither.
template <class T, int kSign>
static DASLLAMA_INLINE void scale_unit(const uint8_t* q, float d, float m, float* y) {
  constexpr bool kSigned = T::kMax == 128 && kFlip == 0;
  const Ints less = splat_ints(kSigned ? 0 : -T::kBias);
  const Floats scale = splat_floats(d), offset = splat_floats(kSign < 0 ? -m : m);
  for (int i = 0; i < 16; i += kLanes) {
    const Floats product = mul(to_floats(add(widen_bytes(q + i, kSigned), less)), scale);
    store_floats(y + i, kSign ? add(product, offset) : product);
  }
}

template <class T>
static DASLLAMA_NOINLINE void decode_row32(const uint8_t* row, int64_t K, float* y) {
  alignas(64) uint8_t q[2][16 * kUnits];
  for (int64_t blocks = K / 32; blocks > 0; blocks -= kUnits, row += kUnits * T::kBytes) {
    const int last = static_cast<int>(std::min<int64_t>(blocks, kUnits)) - 1;
    Ints w[2];
    if (last == kUnits - 1)
      T::unpack(Span<T::kBytes, true>{row, last}, w);
    else
      T::unpack(Span<T::kBytes, false>{row, last}, w);
    store_ints(q[0], w[0]);
    store_ints(q[1], w[1]);
    for (int i = 0; i <= last; i++, y += 32) {
      const uint8_t* block = row + i * T::kBytes;
      const float d = std::is_same_v<T, FastMXFP4> ? mxfp4_scale(block[0]) : f16_at(block);
      const float m = T::kAdd ? f16_at(block + 2) : 0;
      scale_unit<T, T::kAdd>(q[0] + 16 * i, d, m, y);
      scale_unit<T, T::kAdd>(q[1] + 16 * i, d, m, y + 16);
    }
  }
}

// kLanes blocks of the row at once stand where kLanes rows stand in the integer product, as far as scales go.
template <class T>
static DASLLAMA_NOINLINE void decode_row256(const uint8_t* row, int64_t K, float* y) {
  constexpr int kGroup = 256 / T::kGroups;
  alignas(64) uint8_t q[16 * kUnits];
  alignas(64) float d[T::kGroups][kLanes], m[T::kGroups][kLanes] = {};
  for (int64_t blocks = K / 256; blocks > 0; blocks -= kLanes, row += kLanes * T::kBytes) {
    const int count = static_cast<int>(std::min<int64_t>(blocks, kLanes));
    alignas(64) int32_t offsets[kLanes];
    for (int i = 0; i < kLanes; i++) offsets[i] = std::min(i, count - 1) * T::kBytes;
    typename T::Scales scales;
    T::scales(row, load_offsets(offsets), scales);
    for (int g = 0; g < T::kGroups; g++) {
      store_floats(d[g], mul(scales.d, to_floats(scales.scale[g])));
      if constexpr (T::kMin) {
        const Ints pair = scales.mins[g / 2];
        store_floats(m[g], mul(scales.dmin, to_floats(g % 2 ? shift_right(pair, 16) : bit_and(pair, splat_ints(0xffff)))));
      }
    }
    for (int i = 0; i < count; i++, y += 256)
      for (int step = 0; step < T::kSteps; step++) {
        Ints w[T::kSets * T::kParts];
        T::unpack(row + i * T::kBytes, step, w);
        for (int set = 0; set < T::kSets; set++)
          for (int part = 0; part < T::kParts; part++) {
            store_ints(q, w[set * T::kParts + part]);
            for (int unit = 0; unit < kUnits; unit++) {
              const int g = T::group(step, set, unit);
              scale_unit<T, T::kMin ? -1 : 0>(q + 16 * unit, d[g][i], m[g][i], y + g * kGroup + 16 * part);
            }
          }
      }
  }
}

// K elements of a weight type, a multiple of its block -> y.
static void decode_row(int qtype, const uint8_t* row, int64_t K, float* y) {
  switch (qtype) {
#define DASLLAMA_CASE(name, block) \
  case types::name:                \
    return decode_row##block<Fast##name>(row, K, y);
    DASLLAMA_CASE(Q4_0, 32)
    DASLLAMA_CASE(Q4_1, 32)
    DASLLAMA_CASE(Q5_0, 32)
    DASLLAMA_CASE(Q5_1, 32)
    DASLLAMA_CASE(Q8_0, 32)
    DASLLAMA_CASE(IQ4_NL, 32)
    DASLLAMA_CASE(MXFP4, 32)
    DASLLAMA_CASE(Q4_K, 256)
    DASLLAMA_CASE(Q5_K, 256)
    DASLLAMA_CASE(Q6_K, 256)
    DASLLAMA_CASE(IQ4_XS, 256)
#undef DASLLAMA_CASE
    case types::F16: {
      int64_t k = 0;
      for (; k + 16 <= K; k += 16) store16(y + k, load16(reinterpret_cast<const f16*>(row) + k));
      for (; k < K; k++) y[k] = f16_at(row + 2 * k);
      return;
    }
  }
  dequantize_row(qtype, row, K, y);
}

#else

static void decode_row(int qtype, const uint8_t* row, int64_t K, float* y) { dequantize_row(qtype, row, K, y); }

#endif
