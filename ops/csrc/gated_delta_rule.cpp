// Binding of gated_delta_rule, gated_delta_update and gated_delta_rule_backward; semantics in ops/gated_delta_rule.py,
// arithmetic in kernels/gated_delta_rule.inl.
#include "sequences.h"
#include "views.h"

namespace dasllama {
namespace {

// A call's inputs, checked.
struct Call {
  HeadRows q, k, v;
  Tensor g, beta;
  DeltaArgs args = {};

  Call(const Tensor& q_, const Tensor& k_, const Tensor& v_, const Tensor& g_, const Tensor& beta_,
       const Tensor& state)
      : q(checked("q", q_)), k(checked("k", k_)), v(checked("v", v_)) {
    DASLLAMA_CHECK(k.T == q.T && v.T == q.T, "gated_delta_rule", "q has ", q.T, " rows, k ", k.T, " and v ", v.T);
    DASLLAMA_CHECK(k.H == q.H && k.D == q.D, "gated_delta_rule", "q has ", q.H, " heads of ", q.D, ", k has ", k.H,
                   " of ", k.D);
    DASLLAMA_CHECK(k.H > 0 && v.H % k.H == 0, "gated_delta_rule", "v has ", v.H, " heads, wanted a multiple of k's ",
                   k.H);
    g = per_head("g", g_), beta = per_head("beta", beta_);
    DASLLAMA_CHECK(state.scalar_type() == ScalarType::Float && state.dim() == 4 && state.size(1) == v.H &&
                       state.size(2) == k.D && state.size(3) == v.D && state.is_contiguous(),
                   "gated_delta_rule", "state must be contiguous f32 [sequences, ", v.H, ", ", k.D, ", ", v.D, "]");
    args.q = q.data, args.k = k.data, args.v = v.data;
    args.q_row = q.row_stride, args.q_head = q.head_stride, args.k_row = k.row_stride, args.k_head = k.head_stride;
    args.v_row = v.row_stride, args.v_head = v.head_stride;
    args.g = g.const_data_ptr<float>(), args.beta = beta.const_data_ptr<float>();
    args.G = k.H, args.H = v.H, args.Dk = k.D, args.Dv = v.D;
  }

  // f(sequence, head, scratch of `floats` floats) for groups of `heads` heads: each thread gets a part of every
  // sequence's heads.
  template <class F>
  void by_heads(const Sequences& sequences, int64_t heads, int64_t floats, const F& f) const {
    const int64_t n = static_cast<int64_t>(sequences.all.size()), groups = args.H / heads;
    if (!n) return;
    parallel(n * groups, 1 + 16384 / (v.T / n * heads * args.Dk * args.Dv + 1), [&](int64_t begin, int64_t end) {
      float* scratch = static_cast<float*>(thread_scratch(static_cast<size_t>(floats) * sizeof(float)));
      for (int64_t i = begin; i < end; i++)
        for (int64_t h = i / n * heads; h < (i / n + 1) * heads; h++) f(sequences.all[i % n], h, scratch);
    });
  }

 private:
  static const Tensor& checked(const char* name, const Tensor& x) {
    DASLLAMA_CHECK(is_floating(x) && x.dim() >= 2, "gated_delta_rule", name,
                   " must be a floating tensor [..., heads, dim], found ", toString(x.scalar_type()), " of rank ",
                   x.dim());
    return x;
  }
  Tensor per_head(const char* name, const Tensor& t) const {
    DASLLAMA_CHECK(is_floating(t) && t.dim() >= 1 && t.size(-1) == v.H && t.numel() == v.T * v.H, "gated_delta_rule",
                   name, " must be a floating tensor [..., ", v.H, "] of ", v.T, " rows, found ", t.numel(),
                   " elements");
    return as_f32(t);
  }
};

Tensor run(const char* op, const char* name, Call call, const Tensor& v, const Tensor& state, const Tensor& ids) {
  const int64_t T = call.v.T, n_states = state.size(0);
  const int32_t* id = ids_of(op, name, ids, T);
  Tensor y = new_like(v, v.dim(), {}, ScalarType::Float);
  call.args.out = y.mutable_data_ptr<float>();
  float* states = state.mutable_data_ptr<float>();
  perform({state, ids, y}, [=] {
    const DeltaArgs& a = call.args;
    check_ids(op, name, id, T, n_states);
    for (int64_t t = 0; t < T; t++)
      if (id[t] < 0) std::fill_n(a.out + t * a.H * a.Dv, a.H * a.Dv, 0.0f);
    const Kernels& k = kernels();
    count_call(op, k.name);
    call.by_heads({id, T}, 1, delta_scratch(a), [&](const Sequences::One& s, int64_t head, float* scratch) {
      k.gated_delta_rule(a, s.rows, s.n, head, states + (s.state * a.H + head) * a.Dk * a.Dv, scratch);
    });
  });
  return as_dtype(y, v.scalar_type());
}

Tensor gated_delta_update(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& beta,
                          Tensor state, const Tensor& slots) {
  return run("gated_delta_update", "slots", Call(q, k, v, g, beta, state), v, state, slots);
}

std::tuple<Tensor, Tensor> gated_delta_rule(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                                            const Tensor& beta, const Tensor& row_seq, const Tensor& state) {
  const Call call(q, k, v, g, beta, state);
  not_recorded("gated_delta_rule copies its states");
  Tensor next = torch::stable::clone(state);
  Tensor y = run("gated_delta_rule", "row_seq", call, v, next, row_seq);
  return {y, next};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gated_delta_rule_backward(
    const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& beta,
    const Tensor& row_seq, const Tensor& state) {
  const Call call(q, k, v, g, beta, state);
  const DeltaArgs& a = call.args;
  DASLLAMA_CHECK(is_floating(grad) && grad.numel() == v.numel(), "gated_delta_rule_backward", "grad must have v's ",
                 v.numel(), " elements, found ", grad.numel());
  const int32_t* ids = ids_of("gated_delta_rule_backward", "row_seq", row_seq, call.v.T);
  check_ids("gated_delta_rule_backward", "row_seq", ids, call.v.T, state.size(0));
  const Tensor dy = as_f32(grad);
  const auto zeros = [&](const Tensor& x) { return torch::stable::new_zeros(dy, x.sizes(), ScalarType::Float); };
  Tensor dq = zeros(q), dk = zeros(k), dv = zeros(v), dg = zeros(g), dbeta = zeros(beta);
  const DeltaGradients to = {dq.mutable_data_ptr<float>(), dk.mutable_data_ptr<float>(), dv.mutable_data_ptr<float>(),
                             dg.mutable_data_ptr<float>(), dbeta.mutable_data_ptr<float>()};
  const Sequences sequences(ids, call.v.T);
  int64_t longest = 0;
  for (const Sequences::One& s : sequences.all) longest = std::max(longest, s.n);
  const float *dy_data = dy.const_data_ptr<float>(), *states = state.const_data_ptr<float>();
  const Kernels& kernel = kernels();
  count_call("gated_delta_rule_backward", kernel.name);
  // Heads that share a key head add to its gradient, one after the other.
  call.by_heads(sequences, a.H / a.G, delta_backward_scratch(a, longest),
                [&](const Sequences::One& s, int64_t head, float* scratch) {
                  kernel.gated_delta_rule_backward(a, dy_data, s.rows, s.n, head,
                                                   states + (s.state * a.H + head) * a.Dk * a.Dv, to, scratch);
                });
  return {as_dtype(dq, q.scalar_type()), as_dtype(dk, k.scalar_type()), as_dtype(dv, v.scalar_type()),
          as_dtype(dg, g.scalar_type()), as_dtype(dbeta, beta.scalar_type())};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(dasllama, CPU, m) {
  m.impl("gated_delta_rule", TORCH_BOX(&gated_delta_rule));
  m.impl("gated_delta_update", TORCH_BOX(&gated_delta_update));
  m.impl("gated_delta_rule_backward", TORCH_BOX(&gated_delta_rule_backward));
}

}  // namespace dasllama
