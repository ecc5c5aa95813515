// y = cap * tanh(x / cap), and its gradient dx = grad * (1 - (y / cap)^2). Elements [begin, end) of contiguous arrays.

static void softcap(const float* x, float cap, float* y, int64_t begin, int64_t end) {
  const f32x16 c = splat16(cap);
  int64_t i = begin;
  for (; i + 16 <= end; i += 16) store16(y + i, vtanh(load16(x + i) / c) * c);
  if (i < end) store16(y + i, vtanh(load16(x + i, end - i) / c) * c, end - i);
}

static void softcap_backward(const float* grad, const float* y, float cap, float* dx, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i++) {
    const float t = y[i] / cap;
    dx[i] = grad[i] * (1.0f - t * t);
  }
}
