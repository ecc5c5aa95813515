// Binding of softcap and softcap_backward; formulas in ops/softcap.py, loops in kernels/softcap.inl.
#include "views.h"

namespace dasllama {
namespace {

Tensor softcap(const Tensor& x, double cap) {
  DASLLAMA_CHECK(is_floating(x), "softcap", "x must be a floating tensor, found ", toString(x.scalar_type()));
  DASLLAMA_CHECK(cap > 0, "softcap", "cap must be above 0, found ", cap);
  const Tensor in = as_f32(x);
  Tensor y = new_like(x, x.dim(), {}, ScalarType::Float);
  const float* from = in.const_data_ptr<float>();
  float* to = y.mutable_data_ptr<float>();
  const int64_t n = x.numel();
  perform({in, y}, [=] {
    const Kernels& k = kernels();
    count_call("softcap", k.name);
    parallel(n, 8192, [&](int64_t begin, int64_t end) { k.softcap(from, static_cast<float>(cap), to, begin, end); });
  });
  return as_dtype(y, x.scalar_type());
}

Tensor softcap_backward(const Tensor& grad, const Tensor& y, double cap) {
  DASLLAMA_CHECK(is_floating(grad) && is_floating(y) && grad.dim() == y.dim(), "softcap_backward",
                 "grad and y must be floating tensors of one shape");
  for (int64_t d = 0; d < y.dim(); d++)
    DASLLAMA_CHECK(grad.size(d) == y.size(d), "softcap_backward", "grad must have y's shape, found size ", grad.size(d),
                   " of dimension ", d, ", wanted ", y.size(d));
  DASLLAMA_CHECK(cap > 0, "softcap_backward", "cap must be above 0, found ", cap);
  const Tensor g = as_f32(grad), out = as_f32(y);
  Tensor dx = new_like(y, y.dim(), {}, ScalarType::Float);
  const float *from = g.const_data_ptr<float>(), *at = out.const_data_ptr<float>();
  float* to = dx.mutable_data_ptr<float>();
  const Kernels& k = kernels();
  count_call("softcap_backward", k.name);
  parallel(y.numel(), 8192, [&](int64_t begin, int64_t end) {
    k.softcap_backward(from, at, static_cast<float>(cap), to, begin, end);
  });
  return as_dtype(dx, y.scalar_type());
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(dasllama, CPU, m) {
  m.impl("softcap", TORCH_BOX(&softcap));
  m.impl("softcap_backward", TORCH_BOX(&softcap_backward));
}

}  // namespace dasllama
