// Rotary tables and rotation. Table: angle[t][i] = float(position[t]) * inv_freq[i] in f32, where a row of several
// positions gives frequency i that of its axis; cosine and sine in double, rounded once, times the scale. Rotation (half split): with c, s of dimension i < R / 2,
// y[i] = x[i] * c - x[i + R/2] * s and y[i + R/2] = x[i + R/2] * c + x[i] * s; dimensions from R on are copied.

static void rope_tables(const int64_t* positions, int64_t n_axes, const int32_t* axes, const float* inv_freq,
                        float scale, int64_t half, float* cosines, float* sines, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; t++)
    for (int64_t i = 0; i < half; i++) {
      const int64_t position = positions[t * n_axes + (axes ? axes[i] : 0)];
      const double angle = static_cast<float>(position) * inv_freq[i];
      cosines[t * half + i] = static_cast<float>(std::cos(angle)) * scale;
      sines[t * half + i] = static_cast<float>(std::sin(angle)) * scale;
    }
}

// Rows [begin, end) of x, each heads x dim elements; strides in elements, y contiguous.
static void rope(const float* x, int64_t row_stride, int64_t head_stride, const float* cosines, const float* sines,
                 int64_t heads, int64_t dim, int64_t half, float* y, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; t++) {
    const float *c = cosines + t * half, *s = sines + t * half;
    for (int64_t h = 0; h < heads; h++) {
      const float* in = x + t * row_stride + h * head_stride;
      float* out = y + (t * heads + h) * dim;
      int64_t i = 0;
      for (; i + 16 <= half; i += 16) {
        const f32x16 a = load16(in + i), b = load16(in + half + i), ci = load16(c + i), si = load16(s + i);
        store16(out + i, a * ci - b * si);
        store16(out + half + i, b * ci + a * si);
      }
      for (; i < half; i++) {
        out[i] = in[i] * c[i] - in[half + i] * s[i];
        out[half + i] = in[half + i] * c[i] + in[i] * s[i];
      }
      std::memcpy(out + 2 * half, in + 2 * half, static_cast<size_t>(dim - 2 * half) * sizeof(float));
    }
  }
}
