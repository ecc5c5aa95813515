// Binding of gated_act and gated_act_backward; formulas in ops/gated_act.py, loops in kernels/gated_act.inl.
#include "views.h"

namespace dasllama {
namespace {

#define DASLLAMA_CHECK_SHAPE(op, name, t, like)                                                             \
  do {                                                                                                      \
    DASLLAMA_CHECK(is_floating(t) && t.dim() == like.dim() && t.numel() == like.numel(), op,                \
                   name " must be a floating tensor of gate's shape");                                      \
    for (int64_t d = 0; d < like.dim(); d++)                                                                \
      DASLLAMA_CHECK(t.size(d) == like.size(d), op, name " must have gate's shape, found size ", t.size(d), \
                     " of dimension ", d, ", wanted ", like.size(d));                                       \
  } while (0)

Tensor gated_act(const Tensor& gate, const Tensor& up, int64_t act) {
  DASLLAMA_CHECK(is_floating(gate) && gate.dim() >= 1, "gated_act", "gate must be a floating tensor of rank 1 or more");
  DASLLAMA_CHECK_SHAPE("gated_act", "up", up, gate);
  DASLLAMA_CHECK(act >= 0 && act <= 3, "gated_act",
                 "act must be 0 (SiLU), 1 (tanh-GELU), 2 (sigmoid) or 3 (clamped SwiGLU), found ", act);
  const Rows g(gate), u(up);
  Tensor y = new_like(gate, gate.dim(), {}, ScalarType::Float);
  float* out = y.mutable_data_ptr<float>();
  perform({y}, [=] {
    const Kernels& k = kernels();
    count_call("gated_act", k.name);
    parallel(g.rows, 1 + 8192 / (g.C + 1), [&](int64_t begin, int64_t end) {
      k.gated_act(g.data, g.stride, u.data, u.stride, act, g.C, out, begin, end);
    });
  });
  return as_dtype(y, gate.scalar_type());
}

std::tuple<Tensor, Tensor> gated_act_backward(const Tensor& grad, const Tensor& gate, const Tensor& up, int64_t act) {
  DASLLAMA_CHECK(is_floating(gate), "gated_act_backward", "gate must be a floating tensor");
  DASLLAMA_CHECK_SHAPE("gated_act_backward", "grad", grad, gate);
  DASLLAMA_CHECK_SHAPE("gated_act_backward", "up", up, gate);
  DASLLAMA_CHECK(act >= 0 && act <= 3, "gated_act_backward",
                 "act must be 0 (SiLU), 1 (tanh-GELU), 2 (sigmoid) or 3 (clamped SwiGLU), found ", act);
  const Tensor d = as_f32(grad), g = as_f32(gate), u = as_f32(up);
  Tensor dgate = new_like(gate, gate.dim(), {}, ScalarType::Float),
         dup = new_like(gate, gate.dim(), {}, ScalarType::Float);
  const float *d_data = d.const_data_ptr<float>(), *g_data = g.const_data_ptr<float>(),
              *u_data = u.const_data_ptr<float>();
  float *to_gate = dgate.mutable_data_ptr<float>(), *to_up = dup.mutable_data_ptr<float>();
  const Kernels& k = kernels();
  count_call("gated_act_backward", k.name);
  parallel(gate.numel(), 8192, [&](int64_t begin, int64_t end) {
    k.gated_act_backward(d_data, g_data, u_data, act, to_gate, to_up, begin, end);
  });
  return {as_dtype(dgate, gate.scalar_type()), as_dtype(dup, up.scalar_type())};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(dasllama, CPU, m) {
  m.impl("gated_act", TORCH_BOX(&gated_act));
  m.impl("gated_act_backward", TORCH_BOX(&gated_act_backward));
}

}  // namespace dasllama
