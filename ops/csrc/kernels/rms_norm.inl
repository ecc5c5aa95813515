// y = x * r * w with r = 1 / sqrt(mean(x^2) + eps), and its gradient
// dx = r * (g - x * r^2 * mean(g * x)) with g = grad * w. One row at a time; sums in 16 lanes.

static void rms_norm(const float* x, int64_t x_stride, const float* weight, float eps, int64_t C, float* y,
                     int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; row++) {
    const float* in = x + row * x_stride;
    float* out = y + row * C;
    f32x16 sums = {};
    int64_t c = 0;
    for (; c + 16 <= C; c += 16) sums += load16(in + c) * load16(in + c);
    float rest = 0;
    for (int64_t t = c; t < C; t++) rest += in[t] * in[t];
    const float r = 1.0f / std::sqrt((sum16(sums) + rest) / static_cast<float>(C) + eps);
    for (c = 0; c + 16 <= C; c += 16) {
      f32x16 v = load16(in + c) * r;
      store16(out + c, weight ? v * load16(weight + c) : v);
    }
    for (; c < C; c++) out[c] = in[c] * r * (weight ? weight[c] : 1.0f);
  }
}

static void rms_norm_backward(const float* grad, const float* x, const float* weight, float eps, int64_t C, float* dx,
                              int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; row++) {
    const float *in = x + row * C, *g = grad + row * C;
    float* out = dx + row * C;
    double squares = 0, mixed = 0;
    for (int64_t c = 0; c < C; c++) {
      squares += static_cast<double>(in[c]) * in[c];
      mixed += static_cast<double>(g[c]) * (weight ? weight[c] : 1.0f) * in[c];
    }
    const double r = 1.0 / std::sqrt(squares / C + eps);
    for (int64_t c = 0; c < C; c++)
      out[c] = static_cast<float>(r * (g[c] * (weight ? weight[c] : 1.0f) - in[c] * r * r * (mixed / C)));
  }
}
