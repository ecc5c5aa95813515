// Binding of rms_norm and rms_norm_backward; formula and layouts in ops/rms_norm.py, loops in kernels/rms_norm.inl.
#include "binding.h"

namespace dasllama {
namespace {

const float* checked_weight(const std::optional<Tensor>& weight, int64_t C) {
  if (!weight) return nullptr;
  DASLLAMA_CHECK(weight->scalar_type() == ScalarType::Float && weight->dim() == 1 && weight->size(0) == C &&
                     weight->is_contiguous(),
                 "rms_norm", "weight must be contiguous f32 [", C, "]");
  return weight->const_data_ptr<float>();
}

Tensor rms_norm(const Tensor& x, const std::optional<Tensor>& weight, double eps) {
  DASLLAMA_CHECK(is_floating(x) && x.dim() >= 1, "rms_norm", "x must be a floating tensor of rank 1 or more");
  const Tensor x32 = as_f32(x);
  const int64_t C = x.size(-1), rows = C ? x.numel() / C : 0;
  const float* w = checked_weight(weight, C);
  Tensor y = torch::stable::empty_like(x32);
  const float* in = x32.const_data_ptr<float>();
  float* out = y.mutable_data_ptr<float>();
  perform({x32, weight ? *weight : x32, y}, [=] {
    const Kernels& k = kernels();
    count_call("rms_norm", k.name);
    parallel(rows, 1 + 16384 / (C + 1), [&](int64_t begin, int64_t end) {
      k.rms_norm(in, C, w, static_cast<float>(eps), C, out, begin, end);
    });
  });
  return as_dtype(y, x.scalar_type());
}

Tensor rms_norm_backward(const Tensor& grad, const Tensor& x, const std::optional<Tensor>& weight, double eps) {
  DASLLAMA_CHECK(is_floating(x) && is_floating(grad) && x.dim() >= 1 && grad.numel() == x.numel(), "rms_norm_backward",
                 "grad and x must be floating tensors of one shape");
  const Tensor x32 = as_f32(x), g32 = as_f32(grad);
  const int64_t C = x.size(-1), rows = C ? x.numel() / C : 0;
  const float* w = checked_weight(weight, C);
  Tensor dx = torch::stable::empty_like(x32);
  const float *in = x32.const_data_ptr<float>(), *g = g32.const_data_ptr<float>();
  float* out = dx.mutable_data_ptr<float>();
  const Kernels& k = kernels();
  count_call("rms_norm_backward", k.name);
  parallel(rows, 1 + 16384 / (C + 1), [&](int64_t begin, int64_t end) {
    k.rms_norm_backward(g, in, w, static_cast<float>(eps), C, out, begin, end);
  });
  return as_dtype(dx, x.scalar_type());
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(dasllama, CPU, m) {
  m.impl("rms_norm", TORCH_BOX(&rms_norm));
  m.impl("rms_norm_backward", TORCH_BOX(&rms_norm_backward));
}

}  // namespace dasllama
