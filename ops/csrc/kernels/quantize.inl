// Floats to blocks: activations on ggml's lattices (rules and layouts in ops/lattices.py) and weights in the simple
// types (ops/quantize.py). Whatever the input, NaN included, each byte is defined and the same on every instruction set,
// but for the sign of the NaN that s is on Q8_1 where d is infinite: x86 and Arm differ.

// The nearest integer of v, halves to even, or 0 if that is not in [-127, 127]. Adding 1.5 * 2^23 leaves the integer in
// the low bits of the sum.
DASLLAMA_INLINE int32_t nearest_int8(float v) {
  const int32_t q = static_cast<int32_t>(as_bits(v + 12582912.0f) - 0x4b400000u);
  return static_cast<uint32_t>(q + 127u) <= 254u ? q : 0;
}

// The largest magnitude as bits: an integer comparison puts NaN above all numbers.
template <int n>
DASLLAMA_INLINE uint32_t top_bits(const float* x) {
  int32_t top = 0;
  for (int i = 0; i < n; i++) {
    const int32_t a = static_cast<int32_t>(as_bits(x[i]) & 0x7fffffff);
    top = a > top ? a : top;
  }
  return static_cast<uint32_t>(top);
}

// The element whose magnitude is `top`, the first of them if there are several.
template <int n>
DASLLAMA_INLINE float first_of(const float* x, uint32_t top) {
  uint32_t plus = 0, minus = 0;
  for (int i = 0; i < n; i++) {
    plus |= as_bits(x[i]) == top;
    minus |= as_bits(x[i]) == (top | 0x80000000u);
  }
  if (plus && minus) {
    int i = 0;
    while ((as_bits(x[i]) & 0x7fffffff) != top) i++;
    return x[i];
  }
  return as_float(minus ? top | 0x80000000u : top);
}

// Blocks of 32: f16 d, on Q8_1 f16 d * sum(q), int8 q[32].
template <bool with_sum>
static void quantize_32(const float* x, int64_t K, uint8_t* out) {
  for (int64_t b = 0; b < K / 32; b++, x += 32, out += with_sum ? 36 : 34) {
    const float top = as_float(top_bits<32>(x)), d = top / 127.0f, inverse = top != 0 ? 127.0f / top : 0.0f;
    int8_t q[32];  // bytes of `out` may alias x for all that the compiler knows
    for (int i = 0; i < 32; i++) q[i] = static_cast<int8_t>(nearest_int8(x[i] * inverse));
    std::memcpy(out + (with_sum ? 4 : 2), q, 32);
    int32_t sum = 0;
    for (int i = 0; i < 32; i++) sum += q[i];
    store_u16(out, f32_to_f16(d));
    if (with_sum) store_u16(out + 2, f32_to_f16(d * static_cast<float>(sum)));
  }
}

// Blocks of 256: f32 d, int8 q[256], int16 sums of 16. The element of largest magnitude becomes -127.
static void quantize_256(const float* x, int64_t K, uint8_t* out) {
  for (int64_t b = 0; b < K / 256; b++, x += 256, out += 292) {
    const float top = first_of<256>(x, top_bits<256>(x));
    const float inverse = top != 0 ? -127.0f / top : 0.0f, d = top != 0 ? 1.0f / inverse : 0.0f;
    std::memcpy(out, &d, 4);
    int8_t q[256];
    for (int i = 0; i < 256; i++) q[i] = static_cast<int8_t>(nearest_int8(x[i] * inverse));
    std::memcpy(out + 4, q, 256);
    for (int g = 0; g < 16; g++) {
      int32_t sum = 0;
      for (int i = 0; i < 16; i++) sum += q[16 * g + i];
      store_u16(out + 260 + 2 * g, static_cast<uint16_t>(sum));
    }
  }
}

// Rows [begin, end) of x [rows, K] -> blocks of the lattice Q8_0, Q8_1 or Q8_K.
static void quantize_activation(int lattice, const float* x, int64_t K, uint8_t* out, int64_t row_bytes, int64_t begin,
                                int64_t end) {
  for (int64_t row = begin; row < end; row++) {
    const float* in = x + row * K;
    uint8_t* to = out + row * row_bytes;
    if (lattice == types::Q8_0) quantize_32<false>(in, K, to);
    if (lattice == types::Q8_1) quantize_32<true>(in, K, to);
    if (lattice == types::Q8_K) quantize_256(in, K, to);
  }
}

// A weight in Q8_0 rounds halves away from zero and multiplies with 1 / d; see ops/quantize.py.
static void pack_q8_0(const float* x, uint8_t* out) {
  const float d = as_float(top_bits<32>(x)) / 127.0f, inverse = d != 0 ? 1.0f / d : 0.0f;
  store_u16(out, f32_to_f16(d));
  int8_t q[32];
  for (int i = 0; i < 32; i++) {
    // Non-negative floats compare as integers; without float comparisons the compiler vectorizes this.
    const uint32_t bits = as_bits(x[i] * inverse), a = bits & 0x7fffffff;
    const float m = as_float(a < as_bits(127.5f) ? a : 0);
    const int32_t whole = static_cast<int32_t>(m);
    const int32_t nearest = whole + (as_bits(m - static_cast<float>(whole)) >= as_bits(0.5f) ? 1 : 0);
    const int32_t minus = -static_cast<int32_t>(bits >> 31);
    q[i] = static_cast<int8_t>((nearest ^ minus) - minus);
  }
  std::memcpy(out + 2, q, 32);
}

static void pack_q4_0(const float* x, uint8_t* out) {
  const float d = first_of<32>(x, top_bits<32>(x)) / -8.0f, inverse = d != 0 ? 1.0f / d : 0.0f;
  store_u16(out, f32_to_f16(d));
  uint8_t q[32];
  for (int i = 0; i < 32; i++) {
    const float v = x[i] * inverse + 8.5f;
    q[i] = v > 0 ? static_cast<uint8_t>(v < 15.0f ? v : 15.0f) : 0;
  }
  for (int i = 0; i < 16; i++) out[2 + i] = static_cast<uint8_t>(q[i] | q[i + 16] << 4);
}

// n elements -> blocks of F32, F16, BF16, Q8_0 or Q4_0.
static void quantize(int qtype, const float* x, int64_t n, uint8_t* out) {
  switch (qtype) {
    case types::F32:
      std::memcpy(out, x, 4 * static_cast<size_t>(n));
      break;
    case types::F16:
      for (int64_t i = 0; i < n; i++) store_u16(out + 2 * i, f32_to_f16(x[i]));
      break;
    case types::BF16:
      for (int64_t i = 0; i < n; i++) store_u16(out + 2 * i, f32_to_bf16(x[i]));
      break;
    case types::Q8_0:
      for (int64_t i = 0; i < n; i += 32, out += 34) pack_q8_0(x + i, out);
      break;
    case types::Q4_0:
      for (int64_t i = 0; i < n; i += 32, out += 18) pack_q4_0(x + i, out);
      break;
  }
}
