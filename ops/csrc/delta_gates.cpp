// Binding of delta_gates and delta_gates_backward; formulas in ops/delta_gates.py, loops in kernels/delta_gates.inl.
#include "views.h"

namespace dasllama {
namespace {

struct Call {
  Rows a, b;
  DeltaGatesArgs args;

  Call(const Tensor& a_, const Tensor& b_, const Tensor& decay, const Tensor& dt_bias)
      : a(checked("a", a_)), b(checked("b", b_)) {
    DASLLAMA_CHECK(a.C == b.C && a.rows == b.rows, "delta_gates", "a has ", a.rows, " rows of ", a.C, " heads, b has ",
                   b.rows, " of ", b.C);
    args = {a.data, b.data, a.stride, b.stride, per_head("decay", decay), per_head("dt_bias", dt_bias), a.C};
  }

 private:
  static const Tensor& checked(const char* name, const Tensor& t) {
    DASLLAMA_CHECK(is_floating(t) && t.dim() >= 1, "delta_gates", name,
                   " must be a floating tensor of rank 1 or more");
    return t;
  }
  const float* per_head(const char* name, const Tensor& t) const {
    DASLLAMA_CHECK(t.scalar_type() == ScalarType::Float && t.dim() == 1 && t.size(0) == a.C && t.is_contiguous(),
                   "delta_gates", name, " must be contiguous f32 [", a.C, "]");
    return t.const_data_ptr<float>();
  }
};

std::tuple<Tensor, Tensor> delta_gates(const Tensor& a, const Tensor& b, const Tensor& decay, const Tensor& dt_bias) {
  const Call call(a, b, decay, dt_bias);
  Tensor g = new_like(a, a.dim(), {}, ScalarType::Float), beta = new_like(b, b.dim(), {}, ScalarType::Float);
  float *g_data = g.mutable_data_ptr<float>(), *beta_data = beta.mutable_data_ptr<float>();
  perform({call.a.keep, call.b.keep, decay, dt_bias, g, beta}, [=] {
    const Kernels& k = kernels();
    count_call("delta_gates", k.name);
    parallel(call.a.rows, 1 + 4096 / (call.a.C + 1), [&](int64_t begin, int64_t end) {
      k.delta_gates(call.args, g_data, beta_data, begin, end);
    });
  });
  return {g, beta};
}

std::tuple<Tensor, Tensor> delta_gates_backward(const Tensor& dg, const Tensor& dbeta, const Tensor& a,
                                                const Tensor& b, const Tensor& decay, const Tensor& dt_bias) {
  const Call call(a, b, decay, dt_bias);
  DASLLAMA_CHECK(is_floating(dg) && is_floating(dbeta) && dg.numel() == a.numel() && dbeta.numel() == b.numel(),
                 "delta_gates_backward", "dg and dbeta must be floating tensors with a's ", a.numel(), " elements");
  const Tensor dg32 = as_f32(dg), dbeta32 = as_f32(dbeta);
  Tensor da = new_like(a, a.dim(), {}, ScalarType::Float), db = new_like(b, b.dim(), {}, ScalarType::Float);
  const float *dg_data = dg32.const_data_ptr<float>(), *dbeta_data = dbeta32.const_data_ptr<float>();
  float *da_data = da.mutable_data_ptr<float>(), *db_data = db.mutable_data_ptr<float>();
  const Kernels& k = kernels();
  count_call("delta_gates_backward", k.name);
  parallel(call.a.rows, 1 + 4096 / (call.a.C + 1), [&](int64_t begin, int64_t end) {
    k.delta_gates_backward(call.args, dg_data, dbeta_data, da_data, db_data, begin, end);
  });
  return {as_dtype(da, a.scalar_type()), as_dtype(db, b.scalar_type())};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(dasllama, CPU, m) {
  m.impl("delta_gates", TORCH_BOX(&delta_gates));
  m.impl("delta_gates_backward", TORCH_BOX(&delta_gates_backward));
}

}  // namespace dasllama
