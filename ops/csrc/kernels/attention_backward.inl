// Gradient of attention over f32 caches [P, G, R, D]. With p[j] = exp(s[j] - m) / l, dp[j] = grad . v[j] and
// delta = sum_j p[j] dp[j]:  ds[j] = p[j] (dp[j] - delta) * (1 - (s[j] / c)^2) * scale  (the middle factor only if the
// scores are soft-capped),  dq = sum_j ds[j] k[j],  dk[j] = sum ds[j] q,  dv[j] = sum p[j] grad.
// The first pass owns a row: dq, and stats m, 1 / l and delta of each head. The second owns a page of one kv head, so dk
// and dv.

// The capped score, and in *slope the factor from its gradient to that of q . k.
static float score(const AttentionArgs& a, const float* q, const float* k, float* slope) {
  float s = dot(q, k, a.k.D) * a.scale;
  *slope = a.scale;
  if (a.softcap > 0) {
    const float t = tanh_one(s / a.softcap);
    s = t * a.softcap;
    *slope = (1 - t * t) * a.scale;
  }
  return s;
}

// scratch: 3 floats per key that the row sees.
static void attention_backward_q(const AttentionArgs& a, const float* grad, float* stats, float* dq, float* scratch,
                                 int64_t row) {
  const int64_t first = a.row_begin[row], n = a.row_end[row] - first, group = a.H / a.k.G;
  float *p = scratch, *dp = p + n, *slope = dp + n;
  std::memset(dq + row * a.H * a.k.D, 0, static_cast<size_t>(a.H * a.k.D) * sizeof(float));
  if (a.row_seq[row] < 0 || n <= 0) return;
  const int32_t* pages = a.block_table + static_cast<int64_t>(a.row_seq[row]) * a.B;
  for (int64_t h = 0; h < a.H; h++) {
    const auto index = [&](int64_t j) {
      return (pages[(first + j) / a.k.R] * a.k.G + h / group) * a.k.R + (first + j) % a.k.R;
    };
    const float *k = static_cast<const float*>(a.k.data), *v = static_cast<const float*>(a.v.data);
    const float *q = a.q + row * a.q_row + h * a.q_head, *g = grad + (row * a.H + h) * a.v.D;
    float m = a.sinks ? a.sinks[h] : -INFINITY;
    for (int64_t j = 0; j < n; j++) {
      p[j] = score(a, q, k + index(j) * a.k.D, slope + j);
      dp[j] = dot(g, v + index(j) * a.v.D, a.v.D);
      m = p[j] > m ? p[j] : m;
    }
    double sum = a.sinks ? exp_one(a.sinks[h] - m) : 0, mixed = 0;
    for (int64_t j = 0; j < n; j++) {
      p[j] = exp_one(p[j] - m);
      sum += p[j];
      mixed += static_cast<double>(p[j]) * dp[j];
    }
    const float inverse = static_cast<float>(1 / sum), delta = static_cast<float>(mixed / sum);
    for (int64_t j = 0; j < n; j++)
      add_scaled(p[j] * inverse * (dp[j] - delta) * slope[j], k + index(j) * a.k.D, dq + (row * a.H + h) * a.k.D, a.k.D);
    float* s = stats + (row * a.H + h) * 3;
    s[0] = m, s[1] = inverse, s[2] = delta;
  }
}

// Adds to dk and dv (layout of the caches) of the page, whose keys start at position `start`, what the n rows give.
static void attention_backward_kv(const AttentionArgs& a, const float* grad, const float* stats, int64_t kv_head,
                                  int64_t page, int64_t start, const int32_t* rows, int64_t n, float* dk, float* dv) {
  const int64_t group = a.H / a.k.G, base = (page * a.k.G + kv_head) * a.k.R;
  for (int64_t r = 0; r < n; r++) {
    const int64_t row = rows[r], first = a.row_begin[row] - start, last = a.row_end[row] - start;
    for (int64_t j = first < 0 ? 0 : first; j < last && j < a.k.R; j++)
      for (int64_t h = kv_head * group; h < (kv_head + 1) * group; h++) {
        const float *q = a.q + row * a.q_row + h * a.q_head, *g = grad + (row * a.H + h) * a.v.D;
        const float *k = static_cast<const float*>(a.k.data) + (base + j) * a.k.D, *s = stats + (row * a.H + h) * 3;
        float slope;
        const float p = exp_one(score(a, q, k, &slope) - s[0]) * s[1];
        const float dp = dot(g, static_cast<const float*>(a.v.data) + (base + j) * a.v.D, a.v.D);
        add_scaled(p * (dp - s[2]) * slope, q, dk + (base + j) * a.k.D, a.k.D);
        add_scaled(p, g, dv + (base + j) * a.v.D, a.v.D);
      }
  }
}
