// Loops over contiguous f32 vectors that several kernels share.

// f(i, m) for each 16 elements from i in [begin, end), of which m are there: a constant 16 but for the last.
template <class F>
DASLLAMA_INLINE void by_sixteen(int64_t begin, int64_t end, const F& f) {
  int64_t i = begin;
  for (; i + 16 <= end; i += 16) f(i, std::integral_constant<int64_t, 16>());
  if (i < end) f(i, end - i);
}
// The first m <= 16 elements.
DASLLAMA_INLINE f32x16 take16(const float* p, int64_t m) { return m == 16 ? load16(p) : load16(p, m); }
DASLLAMA_INLINE void put16(float* p, f32x16 v, int64_t m) {
  if (m == 16)
    store16(p, v);
  else
    store16(p, v, m);
}

static float dot(const float* a, const float* b, int64_t n) {
  f32x16 sums = {};
  by_sixteen(0, n, [&](int64_t i, auto m) { sums = fma(take16(a + i, m), take16(b + i, m), sums); });
  return sum16(sums);
}

// y += f * x
static void add_scaled(float f, const float* x, float* y, int64_t n) {
  const f32x16 factor = splat16(f);
  by_sixteen(0, n, [&](int64_t i, auto m) { put16(y + i, fma(factor, take16(x + i, m), take16(y + i, m)), m); });
}
