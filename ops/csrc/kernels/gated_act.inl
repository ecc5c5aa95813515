// y = act(gate) * up and its gradient; act 0 is SiLU, x * S(x), act 1 is tanh-GELU, x * S(2 u(x)), act 2 is S(x), where
// S is the logistic function and u(x) = sqrt(2 / pi) * (x + 0.044715 x^3). The second form equals 0.5 x (1 + tanh u)
// and does not cancel.

// act(x); *slope becomes act'(x) if it is wanted.
template <int Act>
DASLLAMA_INLINE f32x16 activation(f32x16 x, f32x16* slope) {
  const f32x16 one = splat16(1.0f);
  f32x16 z = x, dz = one;  // the logistic function's argument and its derivative
  if constexpr (Act == 1) {
    // Beyond 30 the logistic function is 0 or 1 to the last bit; the clamp keeps x^3 finite, and NaN as it is.
    const f32x16 most = splat16(30.0f), least = splat16(-30.0f);
    const f32x16 b = select(less(most, x), most, select(less(x, least), least, x));
    const f32x16 square = b * b;
    const float two_k = 1.5957691216057308f, cubic = 0.044715f;
    z = b * two_k * (one + square * cubic);
    dz = (one + square * (3 * cubic)) * two_k;
  }
  const f32x16 logistic = one / (one + vexp(f32x16{} - z));
  if constexpr (Act == 2) {
    if (slope) *slope = logistic * (one - logistic);
    return logistic;
  }
  const f32x16 y = x * logistic;
  if (slope) *slope = logistic + y * (one - logistic) * dz;
  return y;
}

template <int Act>
static void gated_rows(const float* gate, int64_t gate_stride, const float* up, int64_t up_stride, int64_t C, float* y,
                       int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; row++) {
    const float *g = gate + row * gate_stride, *u = up + row * up_stride;
    float* out = y + row * C;
    int64_t c = 0;
    for (; c + 16 <= C; c += 16) store16(out + c, activation<Act>(load16(g + c), nullptr) * load16(u + c));
    if (c < C) store16(out + c, activation<Act>(load16(g + c, C - c), nullptr) * load16(u + c, C - c), C - c);
  }
}

static void gated_act(const float* gate, int64_t gate_stride, const float* up, int64_t up_stride, int64_t act,
                      int64_t C, float* y, int64_t begin, int64_t end) {
  const auto rows = act == 0 ? gated_rows<0> : act == 1 ? gated_rows<1> : gated_rows<2>;
  rows(gate, gate_stride, up, up_stride, C, y, begin, end);
}

// Elements [begin, end) of contiguous arrays.
template <int Act>
static void gated_gradient(const float* grad, const float* gate, const float* up, float* dgate, float* dup,
                           int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i += 16) {
    const int64_t n = end - i;
    const auto take = [&](const float* p) { return n < 16 ? load16(p + i, n) : load16(p + i); };
    f32x16 slope;
    const f32x16 y = activation<Act>(take(gate), &slope), g = take(grad);
    const f32x16 to_gate = g * take(up) * slope, to_up = g * y;
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
  const auto gradient = act == 0 ? gated_gradient<0> : act == 1 ? gated_gradient<1> : gated_gradient<2>;
  gradient(grad, gate, up, dgate, dup, begin, end);
}
