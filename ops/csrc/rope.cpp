// Bindings of rope_tables, long_rope_tables, query_temperature and rope; formulas in the files of ops/ that have their
// names, loops in kernels/rope.inl.
#include "views.h"

namespace dasllama {
namespace {

// Positions or lengths as contiguous int64 of rank 1, or of `most_rank` at most.
Tensor checked_positions(const char* op, const char* name, const Tensor& t, int64_t most_rank) {
  const ScalarType dtype = t.scalar_type();
  STD_TORCH_CHECK((dtype == ScalarType::Int || dtype == ScalarType::Long) && t.dim() >= 1 && t.dim() <= most_rank,
                  "dasllama::", op, ": ", name, " must be int32 or int64 [T]", most_rank > 1 ? " or [T, A]" : "",
                  ", found ", toString(dtype), " of rank ", t.dim());
  return as_contiguous(as_dtype(t, ScalarType::Long));
}

Tensor checked_frequencies(const char* op, const char* name, const Tensor& t) {
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Float && t.dim() == 1, "dasllama::", op, ": ", name,
                  " must be f32 [R / 2], found ", toString(t.scalar_type()), " of rank ", t.dim());
  return as_contiguous(t);
}

std::tuple<Tensor, Tensor> rope_tables(const Tensor& positions, const Tensor& inv_freq, double scale,
                                       const std::optional<Tensor>& axes) {
  const Tensor p = checked_positions("rope_tables", "positions", positions, 2);
  const Tensor f = checked_frequencies("rope_tables", "inv_freq", inv_freq);
  const int64_t T = p.size(0), half = f.size(0), n_axes = p.dim() == 2 ? p.size(1) : 1;
  Tensor a;
  if (p.dim() == 2) {
    DASLLAMA_CHECK(axes && axes->scalar_type() == ScalarType::Int && axes->dim() == 1 && axes->size(0) == half,
                   "rope_tables", "positions [T, A] need axes, int32 [", half, "]");
    a = as_contiguous(*axes);
    for (int64_t i = 0; i < half; i++) {
      const int32_t axis = a.const_data_ptr<int32_t>()[i];
      DASLLAMA_CHECK(axis >= 0 && axis < n_axes, "rope_tables", "axes must be below ", n_axes, ", found ", axis);
    }
  }
  Tensor cosines = new_like(f, 0, {T, half}, ScalarType::Float), sines = new_like(f, 0, {T, half}, ScalarType::Float);
  const int64_t* at = p.const_data_ptr<int64_t>();
  const int32_t* axis_of = p.dim() == 2 ? a.const_data_ptr<int32_t>() : nullptr;
  const float* frequencies = f.const_data_ptr<float>();
  float *c = cosines.mutable_data_ptr<float>(), *s = sines.mutable_data_ptr<float>();
  perform({p, f, p.dim() == 2 ? a : p, cosines, sines}, [=] {
    const Kernels& k = kernels();
    count_call("rope_tables", k.name);
    parallel(T, 1 + 512 / (half + 1), [&](int64_t begin, int64_t end) {
      k.rope_tables(at, n_axes, axis_of, frequencies, static_cast<float>(scale), half, c, s, begin, end);
    });
  });
  return {cosines, sines};
}

std::tuple<Tensor, Tensor> long_rope_tables(const Tensor& positions, const Tensor& lengths, const Tensor& short_freq,
                                            const Tensor& long_freq, int64_t original, double scale) {
  const Tensor p = checked_positions("long_rope_tables", "positions", positions, 1),
               n = checked_positions("long_rope_tables", "lengths", lengths, 1);
  const Tensor f = checked_frequencies("long_rope_tables", "short", short_freq),
               g = checked_frequencies("long_rope_tables", "long", long_freq);
  const int64_t T = p.size(0), half = f.size(0);
  DASLLAMA_CHECK(n.size(0) == T, "long_rope_tables", "lengths must be [", T, "] as positions are, found [", n.size(0),
                 "]");
  DASLLAMA_CHECK(g.size(0) == half, "long_rope_tables", "long must be [", half, "] as short is, found [", g.size(0),
                 "]");
  Tensor cosines = new_like(f, 0, {T, half}, ScalarType::Float), sines = new_like(f, 0, {T, half}, ScalarType::Float);
  const int64_t *at = p.const_data_ptr<int64_t>(), *length = n.const_data_ptr<int64_t>();
  const float *few = f.const_data_ptr<float>(), *many = g.const_data_ptr<float>();
  float *c = cosines.mutable_data_ptr<float>(), *s = sines.mutable_data_ptr<float>();
  perform({p, n, f, g, cosines, sines}, [=] {
    const Kernels& k = kernels();
    count_call("long_rope_tables", k.name);
    parallel(T, 1 + 512 / (half + 1), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; t++)
        k.rope_tables(at, 1, nullptr, length[t] > original ? many : few, static_cast<float>(scale), half, c, s, t, t + 1);
    });
  });
  return {cosines, sines};
}

// Too small for threads or lanes: one logarithm a row.
Tensor query_temperature(const Tensor& positions, double beta, int64_t original) {
  const Tensor p = checked_positions("query_temperature", "positions", positions, 1);
  DASLLAMA_CHECK(original > 0, "query_temperature", "original must be above 0, found ", original);
  Tensor y = new_like(p, 1, {}, ScalarType::Float);
  const int64_t* at = p.const_data_ptr<int64_t>();
  float* out = y.mutable_data_ptr<float>();
  const int64_t T = p.size(0);
  perform({p, y}, [=] {
    count_call("query_temperature", kernels().name);
    for (int64_t t = 0; t < T; t++)
      out[t] = 1.0f + static_cast<float>(beta) * static_cast<float>(std::log1p(static_cast<double>(at[t] / original)));
  });
  return y;
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
  const Tensor c = as_contiguous(cosines), s = as_contiguous(sines);
  const int64_t half = c.size(1);
  Tensor y = new_like(x, x.dim(), {}, ScalarType::Float);
  const float *cos_data = c.const_data_ptr<float>(), *sin_data = s.const_data_ptr<float>();
  float* out = y.mutable_data_ptr<float>();
  perform({c, s, y}, [=] {
    const Kernels& k = kernels();
    count_call("rope", k.name);
    parallel(in.T, 1 + 16384 / (in.H * in.D + 1), [&](int64_t begin, int64_t end) {
      k.rope(in.data, in.row_stride, in.head_stride, cos_data, sin_data, in.H, in.D, half, out, begin, end);
    });
  });
  return as_dtype(y, x.scalar_type());
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(dasllama, CPU, m) {
  m.impl("rope_tables", TORCH_BOX(&rope_tables));
  m.impl("long_rope_tables", TORCH_BOX(&long_rope_tables));
  m.impl("query_temperature", TORCH_BOX(&query_temperature));
  m.impl("rope", TORCH_BOX(&rope));
}

}  // namespace dasllama
