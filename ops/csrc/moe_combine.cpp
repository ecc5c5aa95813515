// Binding of moe_combine and moe_combine_backward; formulas in ops/moe_combine.py, loops in kernels/moe_combine.inl.
#include "packed.h"
#include "views.h"

namespace dasllama {
namespace {

constexpr int64_t kTask = 8192;  // products for which a thread is worth waking

void check_experts(const char* op, const Tensor& y, const Tensor& weights) {
  bool agree = is_floating(y) && y.dim() >= 2 && weights.is_cpu() && weights.scalar_type() == ScalarType::Float &&
               weights.dim() == y.dim() - 1;
  for (int64_t d = 0; agree && d < weights.dim(); d++) agree = weights.size(d) == y.size(d);
  STD_TORCH_CHECK(agree, "dasllama::", op, ": y must be f32, f16 or bf16 [..., k, C] and weights f32 [..., k] on the ",
                  "CPU, found ", shape_text(y), " and ", shape_text(weights));
}

Tensor moe_combine(const Tensor& y, const Tensor& weights) {
  check_experts("moe_combine", y, weights);
  const int64_t k = y.size(-2), C = y.size(-1), rows = leading(y, y.dim() - 2);
  const Tensor y32 = as_f32(y), w32 = as_f32(weights);
  Tensor total = new_like(y, y.dim() - 2, {C}, ScalarType::Float);
  const float *in = y32.const_data_ptr<float>(), *w = w32.const_data_ptr<float>();
  float* out = total.mutable_data_ptr<float>();
  perform({y32, w32, total}, [=] {
    const Kernels& table = kernels();
    count_call("moe_combine", table.name);
    parallel(rows, 1 + kTask / (k * C + 1),
             [&](int64_t begin, int64_t end) { table.moe_combine(in, w, k, C, out, begin, end); });
  });
  return as_dtype(total, y.scalar_type());
}

std::tuple<Tensor, Tensor> moe_combine_backward(const Tensor& grad, const Tensor& y, const Tensor& weights) {
  check_experts("moe_combine_backward", y, weights);
  const int64_t k = y.size(-2), C = y.size(-1), rows = leading(y, y.dim() - 2);
  DASLLAMA_CHECK(is_floating(grad) && grad.dim() == y.dim() - 1 && grad.size(-1) == C &&
                     leading(grad, grad.dim() - 1) == rows,
                 "moe_combine_backward", "grad must be floating [..., C] like the sum, found ", shape_text(grad),
                 " beside ", shape_text(y));
  const Tensor g32 = as_f32(grad), y32 = as_f32(y), w32 = as_f32(weights);
  Tensor dy = new_like(y, y.dim(), {}, ScalarType::Float), dweights = new_like(y, y.dim() - 1, {}, ScalarType::Float);
  const float *g = g32.const_data_ptr<float>(), *in = y32.const_data_ptr<float>(), *w = w32.const_data_ptr<float>();
  float *to_y = dy.mutable_data_ptr<float>(), *to_weights = dweights.mutable_data_ptr<float>();
  const Kernels& table = kernels();
  count_call("moe_combine_backward", table.name);
  parallel(rows, 1 + kTask / (k * C + 1), [&](int64_t begin, int64_t end) {
    table.moe_combine_backward(g, in, w, k, C, to_y, to_weights, begin, end);
  });
  return {as_dtype(dy, y.scalar_type()), dweights};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(dasllama, CPU, m) {
  m.impl("moe_combine", TORCH_BOX(&moe_combine));
  m.impl("moe_combine_backward", TORCH_BOX(&moe_combine_backward));
}

}  // namespace dasllama
