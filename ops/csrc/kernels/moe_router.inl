// The choice of k of E experts by their logits, and the weights of the chosen; formulas in ops/moe_router.py. One row
// at a time; the sum over all experts in 16 lanes, sums over the chosen in their order.

// A whole number that orders floats: NaN above all, -0 like 0.
static DASLLAMA_INLINE int32_t rank_of(float f) {
  const int32_t bits = static_cast<int32_t>(as_bits(f + 0.0f));
  return f != f ? INT32_MAX : bits < 0 ? bits ^ INT32_MAX : bits;
}

// The k largest of `choice`, best first, equal ones by index. ranks: scratch for k.
static void choose_experts(const float* choice, int64_t E, int64_t k, int32_t* ranks, int64_t* ids) {
  int64_t n = 0;
  for (int64_t e = 0; e < E; e++) {
    const int32_t rank = rank_of(choice[e]);
    if (n == k && rank <= ranks[k - 1]) continue;
    int64_t at = n < k ? n++ : k - 1;
    for (; at > 0 && ranks[at - 1] < rank; at--) {
      ranks[at] = ranks[at - 1];
      ids[at] = ids[at - 1];
    }
    ranks[at] = rank;
    ids[at] = e;
  }
}

static DASLLAMA_INLINE float logistic_one(float x) { return 1.0f / (1.0f + exp_one(-x)); }

// exp(logits - top) into `out`, filled up with zeros to 16; the sum of them.
static float exp_row(const float* logits, float top, int64_t E, float* out) {
  f32x16 sums = {};
  for (int64_t e = 0; e < E; e += 16) {
    float part[16];
    for (int64_t i = 0; i < 16; i++) part[i] = e + i < E ? logits[e + i] : -INFINITY;
    const f32x16 p = vexp(load16(part) - splat16(top));
    store16(out + e, p);
    sums += p;
  }
  return sum16(sums);
}

constexpr float kTinySum = 1e-20f;  // added to a sum of sigmoids before it divides

static void moe_router(const float* logits, int64_t stride, const float* bias, int64_t E, int64_t k, int64_t gate,
                       bool renormalize, float scale, float* weights, int64_t* ids, int64_t begin, int64_t end) {
  const int64_t padded = round16(E);
  float* score = static_cast<float*>(thread_scratch(static_cast<size_t>(2 * padded + k) * sizeof(float)));
  float* choice = score + padded;
  int32_t* ranks = reinterpret_cast<int32_t*>(choice + padded);
  for (int64_t row = begin; row < end; row++) {
    const float* in = logits + row * stride;
    float* w = weights + row * k;
    int64_t* id = ids + row * k;
    float total = 1.0f;
    if (gate == 0) {
      choose_experts(in, E, k, ranks, id);
      const float top = in[id[0]];  // NaN if any is
      if (!renormalize) total = exp_row(in, top, E, score);
      for (int64_t s = 0; s < k; s++) w[s] = exp_one(in[id[s]] - top);
    } else {
      for (int64_t e = 0; e < E; e += 16)
        store16(score + e, logistic16(E - e < 16 ? load16(in + e, E - e) : load16(in + e)));
      for (int64_t e = 0; e < E; e++) choice[e] = bias ? score[e] + bias[e] : score[e];
      choose_experts(choice, E, k, ranks, id);
      for (int64_t s = 0; s < k; s++) w[s] = score[id[s]];
    }
    if (renormalize) {
      total = 0;
      for (int64_t s = 0; s < k; s++) total += w[s];
      if (gate == 1) total += kTinySum;
    }
    for (int64_t s = 0; s < k; s++) w[s] = w[s] / total * scale;
  }
}

// With g = grad * scale, weights u before scaling, and j running over the experts whose logits u depends on:
// softmax: dl_j = u_j (g_j - sum g u), g_j = 0 where j was not chosen; sigmoid: dl_j = d_j s_j (1 - s_j), where d is g
// or, renormalized, (g - sum g u) / sum s.
static void moe_router_backward(const float* grad, const float* logits, const int64_t* ids, int64_t E, int64_t k,
                                int64_t gate, bool renormalize, float scale, float* dlogits, int64_t begin,
                                int64_t end) {
  const int64_t padded = round16(E);
  float* p = static_cast<float*>(thread_scratch(static_cast<size_t>(padded + k) * sizeof(float)));
  float* score = p + padded;  // of the chosen
  for (int64_t row = begin; row < end; row++) {
    const float *in = logits + row * E, *g = grad + row * k;
    const int64_t* id = ids + row * k;
    float* out = dlogits + row * E;
    std::memset(out, 0, static_cast<size_t>(E) * sizeof(float));
    float total = 1.0f, mixed = 0;
    for (int64_t s = 0; s < k; s++) score[s] = gate == 0 ? exp_one(in[id[s]] - in[id[0]]) : logistic_one(in[id[s]]);
    if (gate == 0 && !renormalize) total = exp_row(in, in[id[0]], E, p);
    if (renormalize) {
      total = gate == 0 ? 0.0f : kTinySum;
      for (int64_t s = 0; s < k; s++) total += score[s];
    }
    for (int64_t s = 0; s < k; s++) mixed += g[s] * scale * (score[s] / total);
    if (gate == 0 && !renormalize)
      for (int64_t e = 0; e < E; e++) out[e] = -(p[e] / total) * mixed;
    for (int64_t s = 0; s < k; s++) {
      const float own = g[s] * scale;
      if (gate == 1)
        out[id[s]] = (renormalize ? (own - mixed) / total : own) * score[s] * (1.0f - score[s]);
      else if (renormalize)
        out[id[s]] = score[s] / total * (own - mixed);
      else
        out[id[s]] += score[s] / total * own;
    }
  }
}
