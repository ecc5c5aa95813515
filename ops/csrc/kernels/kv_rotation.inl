// The rotation of a head under the codec tq4: signs, then the orthonormal Walsh-Hadamard transform. It spreads what is
// large over all elements of a head, so that few bits hold them, and leaves dot products as they are.
//
// The transform's stages have the distances 1, 2, 4, ... to n / 2: elements so far apart become their sum and their
// difference. At the end all are multiplied by 1 / sqrt(n). Instruction sets agree, as no sum has another order.

// Signs of a linear congruential generator; a shorter head takes the first of them.
struct RotationSigns {
  float of[kv::most_rotated] = {};
  constexpr RotationSigns() {
    uint32_t s = 0xC0FFEE;
    for (float& sign : of) {
      s = s * 1664525 + 1013904223;
      sign = s & 0x10000 ? -1.0f : 1.0f;
    }
  }
};
constexpr RotationSigns kRotationSigns;

// Lane i of the result is lane i ^ distance of v.
template <int distance>
DASLLAMA_INLINE f32x16 exchange(f32x16 v) {
#if defined(DASLLAMA_ISA_AVX512)
  if constexpr (distance == 8) return _mm512_shuffle_f32x4(v, v, 0x4e);
  if constexpr (distance == 4) return _mm512_shuffle_f32x4(v, v, 0xb1);
  return _mm512_permute_ps(v, distance == 2 ? 0x4e : 0xb1);
#elif defined(DASLLAMA_ISA_AVX2)
  if constexpr (distance == 8) return {v.hi, v.lo};
  if constexpr (distance == 4) return {_mm256_permute2f128_ps(v.lo, v.lo, 1), _mm256_permute2f128_ps(v.hi, v.hi, 1)};
  return {_mm256_permute_ps(v.lo, distance == 2 ? 0x4e : 0xb1), _mm256_permute_ps(v.hi, distance == 2 ? 0x4e : 0xb1)};
#else
  const auto four = [](fvec a) { return distance == 2 ? fvec{a[2], a[3], a[0], a[1]} : fvec{a[1], a[0], a[3], a[2]}; };
  if constexpr (distance == 8) return {v.hi, v.lo};
  if constexpr (distance == 4) return {{v.lo.hi, v.lo.lo}, {v.hi.hi, v.hi.lo}};
  return {{four(v.lo.lo), four(v.lo.hi)}, {four(v.hi.lo), four(v.hi.hi)}};
#endif
}

// A stage within 16 elements: lane i becomes v[i] + v[i + distance], and that one v[i] - v[i + distance].
template <int distance>
DASLLAMA_INLINE f32x16 within(f32x16 v) {
  alignas(64) float signs[16];
  for (int i = 0; i < 16; i++) signs[i] = i & distance ? -1.0f : 1.0f;
  return exchange<distance>(v) + v * load16(signs);
}

// x[0 .. n), n a power of two, 16 or more.
static void hadamard(float* x, int64_t n) {
  for (int64_t i = 0; i < n; i += 16)
    store16(x + i, within<8>(within<4>(within<2>(within<1>(load16(x + i))))));
  for (int64_t distance = 16; distance < n; distance *= 2)
    for (int64_t i = 0; i < n; i += 2 * distance)
      for (int64_t j = i; j < i + distance; j += 16) {
        const f32x16 a = load16(x + j), b = load16(x + j + distance);
        store16(x + j, a + b);
        store16(x + j + distance, a - b);
      }
  const float scale = static_cast<float>(1 / std::sqrt(static_cast<double>(n)));
  for (int64_t i = 0; i < n; i += 16) store16(x + i, load16(x + i) * scale);
}

static void apply_signs(float* x, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) store16(x + i, load16(x + i) * load16(kRotationSigns.of + i));
}
static void rotate(float* x, int64_t n) {
  apply_signs(x, n);
  hadamard(x, n);
}
static void rotate_back(float* x, int64_t n) {
  hadamard(x, n);
  apply_signs(x, n);
}
