// The gated delta rule of one head over the rows of one sequence, and its gradient. With unit k, q (q scaled by
// 1 / sqrt(Dk)), fade e = exp(g) and state M [Dk, Dv] before the row:
//   d = beta (v - e k M),   y = e q M + (q k) d,   M <- e M + k d.
// Columns of M are independent, and a column's sums run over i = 0 ... Dk - 1 one after the other, so neither the number
// of columns in registers nor the number of rows in a call shows in the bits. A pass over M applies row t and takes the
// sums k M and q M of row t + 1: prefill loads and stores M once a row, from the first-level cache.

// What the columns share: unit vectors, fade, beta and q k of some rows of one head.
struct DeltaRows {
  float *q, *k;  // [rows, Dk]
  float fade[kDeltaRows], beta[kDeltaRows], qk[kDeltaRows];
};

// to = x / |x| * scale. Returns 1 / |x|.
static float unit_vector(const float* x, int64_t n, float scale, float* to) {
  const float r = 1.0f / std::sqrt(dot(x, x, n) + 1e-6f);
  const float factor = r * scale;
  for (int64_t i = 0; i < n; i++) to[i] = x[i] * factor;
  return r;
}

static float delta_scale(int64_t Dk) { return 1.0f / std::sqrt(static_cast<float>(Dk)); }

static void delta_prepare(const DeltaArgs& a, const int64_t* rows, int64_t n, int64_t head, DeltaRows* to) {
  const int64_t group = head / (a.H / a.G);
  for (int64_t r = 0; r < n; r++) {
    float *q = to->q + r * a.Dk, *k = to->k + r * a.Dk;
    unit_vector(a.q + rows[r] * a.q_row + group * a.q_head, a.Dk, delta_scale(a.Dk), q);
    unit_vector(a.k + rows[r] * a.k_row + group * a.k_head, a.Dk, 1.0f, k);
    to->fade[r] = exp_one(a.g[rows[r] * a.H + head]);
    to->beta[r] = a.beta[rows[r] * a.H + head];
    to->qk[r] = dot(q, k, a.Dk);
  }
}

// Columns [column, column + 16 * S), whose states lie at `state` with a stride; unless Whole, only m of the last 16.
template <int S, bool Whole>
static void delta_columns(const DeltaArgs& a, const DeltaRows& x, const int64_t* rows, int64_t n, int64_t head,
                          int64_t column, int64_t m, float* state, int64_t stride) {
  const auto used = [&](int s) { return Whole || s < S - 1 ? 16 : m; };
  f32x16 km[S] = {}, qm[S] = {};
  for (int64_t i = 0; i < a.Dk; i++) {
    const f32x16 k = splat16(x.k[i]), q = splat16(x.q[i]);
#pragma GCC unroll 4
    for (int s = 0; s < S; s++) {
      const f32x16 cell = take16(state + i * stride + 16 * s, used(s));
      km[s] = fma(k, cell, km[s]);
      qm[s] = fma(q, cell, qm[s]);
    }
  }
  for (int64_t r = 0; r < n; r++) {
    const f32x16 fade = splat16(x.fade[r]);
    const float* v = a.v + rows[r] * a.v_row + head * a.v_head + column;
    float* y = a.out + (rows[r] * a.H + head) * a.Dv + column;
    f32x16 d[S];
#pragma GCC unroll 4
    for (int s = 0; s < S; s++) {
      d[s] = (take16(v + 16 * s, used(s)) - fade * km[s]) * x.beta[r];
      put16(y + 16 * s, fma(splat16(x.qk[r]), d[s], fade * qm[s]), used(s));
      km[s] = qm[s] = splat16(0.0f);
    }
    // The next row's vectors; after the last row its own, whose sums nobody reads.
    const int64_t next = r + 1 < n ? r + 1 : r;
    const float *k = x.k + r * a.Dk, *next_k = x.k + next * a.Dk, *next_q = x.q + next * a.Dk;
    for (int64_t i = 0; i < a.Dk; i++) {
      const f32x16 ki = splat16(k[i]), nk = splat16(next_k[i]), nq = splat16(next_q[i]);
#pragma GCC unroll 4
      for (int s = 0; s < S; s++) {
        float* at = state + i * stride + 16 * s;
        const f32x16 cell = fma(ki, d[s], fade * take16(at, used(s)));
        put16(at, cell, used(s));
        km[s] = fma(nk, cell, km[s]);
        qm[s] = fma(nq, cell, qm[s]);
      }
    }
  }
}

// scratch: delta_scratch floats. state: [Dk, Dv] of the head.
static void gated_delta_rule(const DeltaArgs& a, const int64_t* rows, int64_t n, int64_t head, float* state,
                             float* scratch) {
  constexpr int S = kWidth == 16 ? 4 : 1;  // registers for 16 * S columns: their M, d and both sums
  DeltaRows x;
  x.q = scratch, x.k = x.q + kDeltaRows * a.Dk;
  float* packed = x.k + kDeltaRows * a.Dk;
  for (int64_t first = 0; first < n; first += kDeltaRows) {
    const int64_t count = n - first < kDeltaRows ? n - first : kDeltaRows;
    delta_prepare(a, rows + first, count, head, &x);
    int64_t c = 0;
    for (; c + 16 * S <= a.Dv; c += 16 * S) {
      if (count == 1) {
        delta_columns<S, true>(a, x, rows + first, count, head, c, 16, state + c, a.Dv);
        continue;
      }
      // Side by side: with their stride, a power of two as a rule, they would share a few sets of the cache.
      for (int64_t i = 0; i < a.Dk; i++) std::memcpy(packed + i * 16 * S, state + i * a.Dv + c, 64 * S);
      delta_columns<S, true>(a, x, rows + first, count, head, c, 16, packed, 16 * S);
      for (int64_t i = 0; i < a.Dk; i++) std::memcpy(state + i * a.Dv + c, packed + i * 16 * S, 64 * S);
    }
    for (; c < a.Dv; c += 16) {
      const int64_t m = a.Dv - c < 16 ? a.Dv - c : 16;
      delta_columns<1, false>(a, x, rows + first, count, head, c, m, state + c, a.Dv);
    }
  }
}

// ---- gradient -------------------------------------------------------------------------------------------------------

// next = e M + k d of a row, which may be M itself; d [Dv] and the error v - e k M come along.
static void delta_step(const DeltaArgs& a, int64_t row, int64_t head, const float* k, const float* M, float* next,
                       float* d, float* error) {
  const float fade = exp_one(a.g[row * a.H + head]), beta = a.beta[row * a.H + head];
  std::memcpy(error, a.v + row * a.v_row + head * a.v_head, static_cast<size_t>(a.Dv) * sizeof(float));
  for (int64_t i = 0; i < a.Dk; i++) add_scaled(-fade * k[i], M + i * a.Dv, error, a.Dv);
  for (int64_t j = 0; j < a.Dv; j++) d[j] = beta * error[j];
  for (int64_t i = 0; i < a.Dk; i++)
    for (int64_t j = 0; j < a.Dv; j++) next[i * a.Dv + j] = fade * M[i * a.Dv + j] + k[i] * d[j];
}

// x's gradient += through x / |x| * scale, given r = 1 / |x|.
static void unit_vector_backward(const float* x, const float* d, int64_t n, float r, float scale, float* dx) {
  const float along = dot(x, d, n) * r * r;
  for (int64_t i = 0; i < n; i++) dx[i] += scale * r * (d[i] - x[i] * along);
}

// Rows go backwards in segments of about sqrt(n), whose states are computed again from the one that the segment began
// with: memory for 2 sqrt(n) states instead of n. scratch: delta_backward_scratch floats. Adds to dq and dk [T, G, Dk];
// writes dv [T, H, Dv], dg and dbeta [T, H]. The algebra is that of ops/gated_delta_rule.py.
static void gated_delta_rule_backward(const DeltaArgs& a, const float* grad, const int64_t* rows, int64_t n,
                                      int64_t head, const float* state, const DeltaGradients& to, float* scratch) {
  const int64_t cells = a.Dk * a.Dv, length = delta_segment(n), segments = (n + length - 1) / length;
  const int64_t group = head / (a.H / a.G);
  float *starts = scratch, *states = starts + segments * cells, *dM = states + (length + 1) * cells;
  float *q = dM + cells, *k = q + a.Dk, *dunit = k + a.Dk;             // [Dk]
  float *d = dunit + a.Dk, *error = d + a.Dv, *taken = error + a.Dv;   // [Dv]
  const auto load_k = [&](int64_t r) {
    return unit_vector(a.k + rows[r] * a.k_row + group * a.k_head, a.Dk, 1.0f, k);
  };
  std::memcpy(starts, state, static_cast<size_t>(cells) * sizeof(float));
  for (int64_t s = 0; s + 1 < segments; s++) {  // forward, keeping where each segment begins
    float* M = starts + (s + 1) * cells;
    std::memcpy(M, M - cells, static_cast<size_t>(cells) * sizeof(float));
    for (int64_t r = s * length; r < (s + 1) * length; r++) {
      load_k(r);
      delta_step(a, rows[r], head, k, M, M, d, error);
    }
  }
  std::memset(dM, 0, static_cast<size_t>(cells) * sizeof(float));
  for (int64_t s = segments - 1; s >= 0; s--) {
    const int64_t first = s * length, last = n < first + length ? n : first + length;
    std::memcpy(states, starts + s * cells, static_cast<size_t>(cells) * sizeof(float));
    for (int64_t r = first; r < last; r++) {
      load_k(r);
      delta_step(a, rows[r], head, k, states + (r - first) * cells, states + (r - first + 1) * cells, d, error);
    }
    for (int64_t r = last - 1; r >= first; r--) {
      const int64_t row = rows[r];
      const float *M = states + (r - first) * cells, *after = M + cells, *dy = grad + (row * a.H + head) * a.Dv;
      const float *x_q = a.q + row * a.q_row + group * a.q_head, *x_k = a.k + row * a.k_row + group * a.k_head;
      const float fade = exp_one(a.g[row * a.H + head]), beta = a.beta[row * a.H + head], scale = delta_scale(a.Dk);
      const float r_q = unit_vector(x_q, a.Dk, scale, q), r_k = load_k(r);
      delta_step(a, row, head, k, M, states + (r - first + 1) * cells, d, error);  // the same state; d and the error
      for (int64_t i = 0; i < a.Dk; i++) {
        dunit[i] = dot(after + i * a.Dv, dy, a.Dv);
        add_scaled(q[i], dy, dM + i * a.Dv, a.Dv);
      }
      unit_vector_backward(x_q, dunit, a.Dk, r_q, scale, to.q + (row * a.G + group) * a.Dk);
      std::memset(taken, 0, static_cast<size_t>(a.Dv) * sizeof(float));  // gradient of d
      for (int64_t i = 0; i < a.Dk; i++) add_scaled(k[i], dM + i * a.Dv, taken, a.Dv);
      to.beta[row * a.H + head] = dot(taken, error, a.Dv);
      float* dv = to.v + (row * a.H + head) * a.Dv;
      for (int64_t j = 0; j < a.Dv; j++) dv[j] = beta * taken[j];
      float dg = 0;
      for (int64_t i = 0; i < a.Dk; i++) {
        float* dMi = dM + i * a.Dv;
        dunit[i] = dot(dMi, d, a.Dv) - fade * dot(M + i * a.Dv, dv, a.Dv);
        add_scaled(-k[i], dv, dMi, a.Dv);
        dg += dot(dMi, M + i * a.Dv, a.Dv);
        for (int64_t j = 0; j < a.Dv; j++) dMi[j] *= fade;
      }
      unit_vector_backward(x_k, dunit, a.Dk, r_k, 1.0f, to.k + (row * a.G + group) * a.Dk);
      to.g[row * a.H + head] = fade * dg;
    }
  }
}
