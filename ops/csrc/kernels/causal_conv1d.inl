// y[t, c] = SiLU(z), z = sum over j < K of w[c, j] * input(t - (K - 1) + j), oldest tap first, where inputs before the
// sequence's first row come from its state [K - 1, C]; and the gradient of y. A task owns some channels of one sequence.

// Row i of the sequence's inputs, counted from the first of this call; negative ones are the state's.
static const float* conv_input(const ConvArgs& a, const int64_t* rows, const float* state, int64_t i) {
  return i >= 0 ? a.x + rows[i] * a.x_row : state + (i + a.K - 1) * a.C;
}

// Taps [K, end - begin] of the task's channels: weights lie channel by channel.
static void conv_taps(const ConvArgs& a, int64_t begin, int64_t end, float* taps) {
  for (int64_t c = begin; c < end; c++)
    for (int64_t j = 0; j < a.K; j++) taps[j * (end - begin) + c - begin] = a.weight[c * a.K + j];
}

// z of 16 channels of row i.
DASLLAMA_INLINE f32x16 conv_sum(const ConvArgs& a, const int64_t* rows, const float* state, const float* taps,
                                int64_t width, int64_t i, int64_t c, int64_t offset, int64_t m) {
  f32x16 z = {};
  for (int64_t j = 0; j < a.K; j++) {
    const float* in = conv_input(a, rows, state, i - (a.K - 1) + j) + c;
    z = fma(take16(taps + j * width + offset, m), take16(in, m), z);
  }
  return z;
}

// scratch: K * (end - begin) floats. Leaves the last inputs in the state.
static void causal_conv1d(const ConvArgs& a, const int64_t* rows, int64_t n, float* state, int64_t begin, int64_t end,
                          float* scratch) {
  const int64_t width = end - begin;
  conv_taps(a, begin, end, scratch);
  for (int64_t i = 0; i < n; i++)
    by_sixteen(begin, end, [&](int64_t c, auto m) {
      const f32x16 z = conv_sum(a, rows, state, scratch, width, i, c, c - begin, m);
      put16(a.out + rows[i] * a.C + c, activation<0>(z, nullptr), m);
    });
  for (int64_t j = 0; j < a.K - 1; j++)  // upwards, so that a state's row is read before it is overwritten
    std::memmove(state + j * a.C + begin, conv_input(a, rows, state, n - (a.K - 1) + j) + begin,
                 static_cast<size_t>(width) * sizeof(float));
}

// out = dx. dz: [T, C], for the gradients of z. scratch as above.
static void causal_conv1d_backward(const ConvArgs& a, const float* grad, const int64_t* rows, int64_t n,
                                   const float* state, int64_t begin, int64_t end, float* dz, float* scratch) {
  const int64_t width = end - begin;
  conv_taps(a, begin, end, scratch);
  for (int64_t i = 0; i < n; i++)
    by_sixteen(begin, end, [&](int64_t c, auto m) {
      f32x16 slope;
      activation<0>(conv_sum(a, rows, state, scratch, width, i, c, c - begin, m), &slope);
      put16(dz + rows[i] * a.C + c, take16(grad + rows[i] * a.C + c, m) * slope, m);
    });
  for (int64_t i = 0; i < n; i++)
    by_sixteen(begin, end, [&](int64_t c, auto m) {
      f32x16 sum = {};
      for (int64_t j = 0; j < a.K && i + j < n; j++)
        sum = fma(take16(scratch + (a.K - 1 - j) * width + c - begin, m), take16(dz + rows[i + j] * a.C + c, m), sum);
      put16(a.out + rows[i] * a.C + c, sum, m);
    });
}
