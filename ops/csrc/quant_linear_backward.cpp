// Binding of quant_linear_backward; formula in ops/quant_linear.py, loops in kernels/matmul_float_backward.inl.
#include <algorithm>

#include "packed.h"

namespace dasllama {
namespace {

Tensor quant_linear_backward(const Tensor& grad, const Tensor& qweight, int64_t qtype) {
  const TypeInfo type = checked_matrix("quant_linear_backward", qweight, qtype);
  const int64_t N = qweight.size(0), K = qweight.size(1) / type.bytes * type.block;
  DASLLAMA_CHECK(is_floating(grad) && grad.dim() >= 1 && grad.size(-1) == N, "quant_linear_backward",
                 "grad must be f32, f16 or bf16 [..., ", N, "] for this qweight, found ", shape_text(grad));
  int64_t M = 1;
  for (int64_t i = 0; i + 1 < grad.dim(); i++) M *= grad.size(i);

  const Tensor g32 = as_f32(grad);
  Tensor dx = torch::stable::new_empty(g32, with_last(grad, K));
  const FloatMatmulBackward p = {g32.const_data_ptr<float>(), qweight.const_data_ptr<uint8_t>(), qweight.size(1),
                                 static_cast<int>(qtype),     dx.mutable_data_ptr<float>(),      M,
                                 N,                           K};
  const Kernels& k = kernels();
  count_call("quant_linear_backward", k.name);
  // Threads own columns of dx in groups that no block crosses.
  const int64_t group = std::max<int64_t>(type.block, 32);
  const int64_t work = group * std::max<int64_t>(N, 1) * std::clamp<int64_t>(M, 1, 1 << 16);
  parallel((K + group - 1) / group, 1 + (1 << 16) / work, [&](int64_t begin, int64_t end) {
    k.matmul_float_backward(p, begin * group, std::min(end * group, K));
  });
  return as_dtype(dx, grad.scalar_type());
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(dasllama, CPU, m) { m.impl("quant_linear_backward", TORCH_BOX(&quant_linear_backward)); }

}  // namespace dasllama
