// Bindings of rope_tables and rope; formulas in ops/rope_tables.py and ops/rope.py, loops in kernels/rope.inl.
#include "views.h"

namespace dasllama {
namespace {

std::tuple<Tensor, Tensor> rope_tables(const Tensor& positions, const Tensor& inv_freq, double scale) {
  const ScalarType dtype = positions.scalar_type();
  DASLLAMA_CHECK((dtype == ScalarType::Int || dtype == ScalarType::Long) && positions.dim() == 1, "rope_tables",
                 "positions must be int32 or int64 [T], found ", toString(dtype), " of rank ", positions.dim());
  DASLLAMA_CHECK(inv_freq.scalar_type() == ScalarType::Float && inv_freq.dim() == 1, "rope_tables",
                 "inv_freq must be f32 [R / 2], found ", toString(inv_freq.scalar_type()), " of rank ", inv_freq.dim());
  const Tensor p =
      torch::stable::contiguous(dtype == ScalarType::Long ? positions : torch::stable::to(positions, ScalarType::Long));
  const Tensor f = torch::stable::contiguous(inv_freq);
  const int64_t T = p.size(0), half = f.size(0);
  Tensor cosines = new_like(f, 0, {T, half}, ScalarType::Float), sines = new_like(f, 0, {T, half}, ScalarType::Float);
  const int64_t* at = p.const_data_ptr<int64_t>();
  const float* frequencies = f.const_data_ptr<float>();
  float *c = cosines.mutable_data_ptr<float>(), *s = sines.mutable_data_ptr<float>();
  const Kernels& k = kernels();
  count_call("rope_tables", k.name);
  parallel(T, 1 + 512 / (half + 1), [&](int64_t begin, int64_t end) {
    k.rope_tables(at, frequencies, static_cast<float>(scale), half, c, s, begin, end);
  });
  return {cosines, sines};
}

Tensor rope(const Tensor& x, const Tensor& cosines, const Tensor& sines) {
  DASLLAMA_CHECK(is_floating(x) && x.dim() >= 2, "rope", "x must be a floating tensor [..., H, D], found ",
                 toString(x.scalar_type()), " of rank ", x.dim());
  const HeadRows in(x);
  for (const Tensor* table : {&cosines, &sines}) {
    DASLLAMA_CHECK(table->scalar_type() == ScalarType::Float && table->dim() == 2, "rope",
                   "cos and sin must be f32 [T, R / 2], found ", toString(table->scalar_type()), " of rank ",
                   table->dim());
    DASLLAMA_CHECK(table->size(0) == in.T && table->size(1) == cosines.size(1) && 2 * table->size(1) <= in.D, "rope",
                   "cos and sin must be [", in.T, ", at most ", in.D / 2, "] as x has ", in.T, " rows of heads of ",
                   in.D, ", found [", table->size(0), ", ", table->size(1), "]");
  }
  const Tensor c = torch::stable::contiguous(cosines), s = torch::stable::contiguous(sines);
  Tensor y = new_like(x, x.dim(), {}, ScalarType::Float);
  const float *cos_data = c.const_data_ptr<float>(), *sin_data = s.const_data_ptr<float>();
  float* out = y.mutable_data_ptr<float>();
  const Kernels& k = kernels();
  count_call("rope", k.name);
  parallel(in.T, 1 + 16384 / (in.H * in.D + 1), [&](int64_t begin, int64_t end) {
    k.rope(in.data, in.row_stride, in.head_stride, cos_data, sin_data, in.H, in.D, c.size(1), out, begin, end);
  });
  return as_dtype(y, x.scalar_type());
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(dasllama, CPU, m) {
  m.impl("rope_tables", TORCH_BOX(&rope_tables));
  m.impl("rope", TORCH_BOX(&rope));
}

}  // namespace dasllama
