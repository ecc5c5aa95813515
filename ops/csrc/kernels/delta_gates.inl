// g = decay * softplus(a + dt_bias), beta = S(b), with S the logistic function, softplus(x) = max(x, 0) + log(1 +
// exp(-|x|)), and their gradients da = dg * decay * S(a + dt_bias), db = dbeta * beta * (1 - beta). Rows of H heads.

static void delta_gates(const DeltaGatesArgs& p, float* g, float* beta, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; t++)
    by_sixteen(0, p.H, [&](int64_t h, auto m) {
      const f32x16 x = take16(p.a + t * p.a_row + h, m) + take16(p.dt_bias + h, m), zero = {};
      const f32x16 softplus = max(x, zero) + vlog1p(vexp(zero - max(x, zero - x)));
      put16(g + t * p.H + h, take16(p.decay + h, m) * softplus, m);
      put16(beta + t * p.H + h, logistic16(take16(p.b + t * p.b_row + h, m)), m);
    });
}

static void delta_gates_backward(const DeltaGatesArgs& p, const float* dg, const float* dbeta, float* da, float* db,
                                 int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; t++)
    by_sixteen(0, p.H, [&](int64_t h, auto m) {
      const f32x16 x = take16(p.a + t * p.a_row + h, m) + take16(p.dt_bias + h, m);
      put16(da + t * p.H + h, take16(dg + t * p.H + h, m) * take16(p.decay + h, m) * logistic16(x), m);
      const f32x16 beta = logistic16(take16(p.b + t * p.b_row + h, m));
      put16(db + t * p.H + h, take16(dbeta + t * p.H + h, m) * beta * (splat16(1.0f) - beta), m);
    });
}
