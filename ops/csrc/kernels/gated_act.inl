// y = act(gate) * up and its gradient, with S the logistic function. act 0 is SiLU, x * S(x); act 1 is tanh-GELU,
// x * S(2 u(x)), u(x) = sqrt(2 / pi) * (x + 0.044715 x^3), which equals 0.5 x (1 + tanh u) and does not cancel; act 2
// is S(x) alone; act 3 is gpt-oss' SwiGLU, c * S(1.702 c) with c = min(x, 7), which multiplies 1 + up, where up is
// clamped to [-7, 7] first.

constexpr float kSwigluSlope = 1.702f, kSwigluLimit = 7.0f;

// act(x); *slope becomes act'(x) if it is wanted.
template <int Act>
DASLLAMA_INLINE f32x16 activation(f32x16 x, f32x16* slope) {
  const f32x16 one = splat16(1.0f), limit = splat16(kSwigluLimit);
  f32x16 z = x, dz = one, inside = one;  // the logistic function's argument, its derivative, that of a clamp
  if constexpr (Act == 1) {
    // Beyond 30 the logistic function is 0 or 1 to the last bit; the clamp keeps x^3 finite, and NaN as it is.
    const f32x16 most = splat16(30.0f), least = splat16(-30.0f);
    const f32x16 b = select(less(most, x), most, select(less(x, least), least, x));
    const f32x16 square = b * b;
    const float two_k = 1.5957691216057308f, cubic = 0.044715f;
    z = b * two_k * (one + square * cubic);
    dz = (one + square * (3 * cubic)) * two_k;
  }
  if constexpr (Act == 3) {
    const auto over = less(limit, x);
    x = select(over, limit, x);
    inside = select(over, f32x16{}, one);
    z = x * kSwigluSlope;
    dz = splat16(kSwigluSlope);
  }
  const f32x16 logistic = one / (one + vexp(f32x16{} - z));
  const f32x16 y = Act == 2 ? logistic : x * logistic;
  if (slope) *slope = (Act == 2 ? f32x16{} : logistic) + y * (one - logistic) * dz;
  if (slope && Act == 3) *slope = *slope * inside;
  return y;
}

// What act(gate) is multiplied with; *slope becomes its derivative, 1 or 0, if it is wanted.
template <int Act>
DASLLAMA_INLINE f32x16 factor(f32x16 up, f32x16* slope) {
  const f32x16 one = splat16(1.0f);
  if (slope) *slope = one;
  if constexpr (Act == 3) {
    const f32x16 most = splat16(kSwigluLimit), least = splat16(-kSwigluLimit);
    const auto over = less(most, up), under = less(up, least);
    if (slope) *slope = select(over, f32x16{}, select(under, f32x16{}, one));
    up = select(over, most, select(under, least, up)) + one;
  }
  return up;
}

template <int Act>
static void gated_rows(const float* gate, int64_t gate_stride, const float* up, int64_t up_stride, int64_t C, float* y,
                       int64_t begin, int64_t end) {
  const auto product = [](f32x16 g, f32x16 u) { return activation<Act>(g, nullptr) * factor<Act>(u, nullptr); };
  for (int64_t row = begin; row < end; row++) {
    const float *g = gate + row * gate_stride, *u = up + row * up_stride;
    float* out = y + row * C;
    int64_t c = 0;
    for (; c + 16 <= C; c += 16) store16(out + c, product(load16(g + c), load16(u + c)));
    if (c < C) store16(out + c, product(load16(g + c, C - c), load16(u + c, C - c)), C - c);
  }
}

static void gated_act(const float* gate, int64_t gate_stride, const float* up, int64_t up_stride, int64_t act,
                      int64_t C, float* y, int64_t begin, int64_t end) {
  constexpr decltype(&gated_rows<0>) of_act[] = {gated_rows<0>, gated_rows<1>, gated_rows<2>, gated_rows<3>};
  of_act[act](gate, gate_stride, up, up_stride, C, y, begin, end);
}

// Elements [begin, end) of contiguous arrays.
template <int Act>
static void gated_gradient(const float* grad, const float* gate, const float* up, float* dgate, float* dup,
                           int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i += 16) {
    const int64_t n = end - i;
    const auto take = [&](const float* p) { return n < 16 ? load16(p + i, n) : load16(p + i); };
    f32x16 slope, up_slope;
    const f32x16 y = activation<Act>(take(gate), &slope), u = factor<Act>(take(up), &up_slope), g = take(grad);
    const f32x16 to_gate = g * u * slope, to_up = g * y * up_slope;
    if (n < 16) {
      store16(dgate + i, to_gate, n);
      store16(dup + i, to_up, n);
    } else {
      store16(dgate + i, to_gate);
      store16(dup + i, to_up);
    }
  }
}

static void gated_act_backward(const float* grad, const float* gate, const float* up, int64_t act, float* dgate,
                               float* dup, int64_t begin, int64_t end) {
  constexpr decltype(&gated_gradient<0>) of_act[] = {gated_gradient<0>, gated_gradient<1>, gated_gradient<2>,
                                                     gated_gradient<3>};
  of_act[act](grad, gate, up, dgate, dup, begin, end);
}
