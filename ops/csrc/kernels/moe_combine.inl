// out[c] = sum over s of w[s] * y[s, c], s ascending, and its gradients: dy[s, c] = w[s] * grad[c], and dw[s] = sum over
// c of grad[c] * y[s, c], in 16 lanes. One row, that is one token, at a time.

static void moe_combine(const float* y, const float* weights, int64_t k, int64_t C, float* out, int64_t begin,
                        int64_t end) {
  for (int64_t row = begin; row < end; row++) {
    const float *in = y + row * k * C, *w = weights + row * k;
    const auto sum_at = [&](int64_t c, const auto& take) {
      f32x16 sum = {};
      for (int64_t s = 0; s < k; s++) sum = sum + take(in + s * C + c) * w[s];
      return sum;
    };
    int64_t c = 0;
    for (; c + 16 <= C; c += 16) store16(out + row * C + c, sum_at(c, [](const float* p) { return load16(p); }));
    const int64_t rest = C - c;
    if (rest) store16(out + row * C + c, sum_at(c, [&](const float* p) { return load16(p, rest); }), rest);
  }
}

static void moe_combine_backward(const float* grad, const float* y, const float* weights, int64_t k, int64_t C,
                                 float* dy, float* dweights, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; row++)
    for (int64_t s = row * k; s < (row + 1) * k; s++) {
      const float *g = grad + row * C, *in = y + s * C;
      float* to = dy + s * C;
      f32x16 sums = {};
      int64_t c = 0;
      for (; c + 16 <= C; c += 16) {
        store16(to + c, load16(g + c) * weights[s]);
        sums += load16(g + c) * load16(in + c);
      }
      if (c < C) {
        store16(to + c, load16(g + c, C - c) * weights[s], C - c);
        sums += load16(g + c, C - c) * load16(in + c, C - c);
      }
      dweights[s] = sum16(sums);
    }
}
