// Rows [begin, end) of x (heads x dim elements, strides in elements) into a cache [P, heads, R, dim] of f32 or f16, whose
// pages are page_stride elements apart.
// slots[t] = page * R + row, -1 for a row that is not written. f16 holds at most 65504, to which larger values are
// clamped.

template <class T>
static void write_rows(const float* x, int64_t row_stride, int64_t head_stride, int64_t heads, int64_t dim,
                       const int64_t* slots, T* cache, int64_t page_stride, int64_t R, int64_t begin, int64_t end) {
  const f32x16 most = splat16(65504.0f), least = splat16(-65504.0f);
  const auto clamped = [&](f32x16 v) {
    if constexpr (std::is_same_v<T, float>) return v;
    return select(less(most, v), most, select(less(v, least), least, v));  // NaN stays NaN
  };
  for (int64_t t = begin; t < end; t++) {
    if (slots[t] < 0) continue;
    const int64_t page = slots[t] / R, row = slots[t] % R;
    for (int64_t h = 0; h < heads; h++) {
      const float* in = x + t * row_stride + h * head_stride;
      T* out = cache + page * page_stride + (h * R + row) * dim;
      int64_t d = 0;
      for (; d + 16 <= dim; d += 16) store16(out + d, clamped(load16(in + d)));
      if (d < dim) store16(out + d, clamped(load16(in + d, dim - d)), dim - d);
    }
  }
}

static void kv_write(const float* x, int64_t row_stride, int64_t head_stride, int64_t heads, int64_t dim,
                     const int64_t* slots, void* cache, bool half, int64_t page_stride, int64_t R, int64_t begin,
                     int64_t end) {
  if (half)
    write_rows(x, row_stride, head_stride, heads, dim, slots, static_cast<f16*>(cache), page_stride, R, begin, end);
  else
    write_rows(x, row_stride, head_stride, heads, dim, slots, static_cast<float*>(cache), page_stride, R, begin, end);
}
