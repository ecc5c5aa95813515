// Bindings of add, mul, copy, join and columns: what ops/elementwise.py says, in loops that need no instruction set of
// their own.
#include <algorithm>

#include "packed.h"
#include "views.h"

namespace dasllama {
namespace {

constexpr int kMaxDims = 6;
constexpr int64_t kGrain = 1 << 14;  // elements that are worth a thread

// One or two f32 operands as seen through the output's shape: strides in elements, 0 where an operand is repeated.
struct Walk {
  int64_t dims = 0, sizes[kMaxDims], strides[2][kMaxDims];

  // Calls f(out index, offsets of the operands, n, steps) for runs of the last dimension within [begin, end) of rows.
  template <class F>
  void rows(int64_t begin, int64_t end, const F& f) const {
    const int64_t n = dims ? sizes[dims - 1] : 1;
    for (int64_t row = begin; row < end; row++) {
      int64_t offset[2] = {0, 0};
      for (int64_t d = dims - 2, rest = row; d >= 0; rest /= sizes[d], d--)
        for (int i = 0; i < 2; i++) offset[i] += rest % sizes[d] * strides[i][d];
      f(row * n, offset[0], offset[1], n);
    }
  }
  int64_t step(int i) const { return dims ? strides[i][dims - 1] : 0; }
};

void check_operand(const char* op, const char* name, const Tensor& t) {
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Float && t.is_cpu() && t.dim() <= kMaxDims, "dasllama::", op, ": ",
                  name, " must be f32 of rank ", kMaxDims, " or less on the CPU, found ", toString(t.scalar_type()), " ",
                  shape_text(t));
}

Walk walk(const char* op, const Tensor& a, const Tensor& b, std::vector<int64_t>& shape) {
  check_operand(op, "a", a);
  check_operand(op, "b", b);
  Walk w;
  w.dims = std::max(a.dim(), b.dim());
  shape.resize(static_cast<size_t>(w.dims));
  const Tensor* operands[2] = {&a, &b};
  for (int64_t d = 0; d < w.dims; d++) {
    w.sizes[d] = 1;
    for (const Tensor* t : operands) {
      const int64_t at = d - (w.dims - t->dim());
      if (at < 0 || t->size(at) == 1) continue;
      STD_TORCH_CHECK(w.sizes[d] == 1 || w.sizes[d] == t->size(at), "dasllama::", op, ": a ", shape_text(a), " and b ",
                      shape_text(b), " do not go together");
      w.sizes[d] = t->size(at);
    }
    for (int i = 0; i < 2; i++) {
      const int64_t at = d - (w.dims - operands[i]->dim());
      w.strides[i][d] = at < 0 || operands[i]->size(at) == 1 ? 0 : operands[i]->stride(at);
    }
    shape[static_cast<size_t>(d)] = w.sizes[d];
  }
  return w;
}

template <class F>
Tensor binary(const char* op, const Tensor& a, const Tensor& b, F f) {
  std::vector<int64_t> shape;
  const Walk w = walk(op, a, b, shape);
  Tensor y = torch::stable::new_empty(a, shape, ScalarType::Float);
  const float *x0 = a.const_data_ptr<float>(), *x1 = b.const_data_ptr<float>();
  float* out = y.mutable_data_ptr<float>();
  const int64_t n = w.dims ? w.sizes[w.dims - 1] : 1, rows = n ? y.numel() / n : 0;
  perform({a, b, y}, [=] {
    count_call(op, "plain");
    const int64_t s0 = w.step(0), s1 = w.step(1);
    parallel(rows, 1 + kGrain / (n + 1), [&](int64_t begin, int64_t end) {
      w.rows(begin, end, [&](int64_t at, int64_t o0, int64_t o1, int64_t n) {
        if (s0 == 1 && s1 == 1)
          for (int64_t i = 0; i < n; i++) out[at + i] = f(x0[o0 + i], x1[o1 + i]);
        else
          for (int64_t i = 0; i < n; i++) out[at + i] = f(x0[o0 + i * s0], x1[o1 + i * s1]);
      });
    });
  });
  return y;
}

Tensor add(const Tensor& a, const Tensor& b) {
  return binary("add", a, b, [](float x, float y) { return x + y; });
}

Tensor mul(const Tensor& a, const Tensor& b) {
  return binary("mul", a, b, [](float x, float y) { return x * y; });
}

}  // namespace

Tensor copy(const Tensor& x) {
  return binary("copy", x, x, [](float a, float) { return a; });
}

namespace {

Tensor join(const Tensor& a, const Tensor& b) {
  check_operand("join", "a", a);
  check_operand("join", "b", b);
  bool alike = a.dim() == b.dim() && a.dim() >= 1;
  for (int64_t d = 0; alike && d + 1 < a.dim(); d++) alike = a.size(d) == b.size(d);
  DASLLAMA_CHECK(alike, "join", "a ", shape_text(a), " and b ", shape_text(b), " differ before the last dim");
  const Rows first(a), second(b);
  Tensor y = new_like(a, a.dim() - 1, {first.C + second.C}, ScalarType::Float);
  float* out = y.mutable_data_ptr<float>();
  perform({first.keep, second.keep, y}, [=] {
    count_call("join", "plain");
    const int64_t n = first.C + second.C;
    parallel(first.rows, 1 + kGrain / (n + 1), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; r++) {
        std::copy_n(first.data + r * first.stride, first.C, out + r * n);
        std::copy_n(second.data + r * second.stride, second.C, out + r * n + first.C);
      }
    });
  });
  return y;
}

Tensor columns(const Tensor& x, const Tensor& index) {
  check_operand("columns", "x", x);
  DASLLAMA_CHECK(x.dim() >= 1 && index.is_cpu() && index.scalar_type() == ScalarType::Long, "columns",
                 "wanted x [..., C] and index int64 on the CPU, found ", shape_text(x), " and ", shape_text(index));
  const Rows in(x);
  const Tensor chosen = as_contiguous(index);
  const int64_t n = index.numel();
  std::vector<int64_t> shape;
  for (int64_t d = 0; d + 1 < x.dim(); d++) shape.push_back(x.size(d));
  for (int64_t d = 0; d < index.dim(); d++) shape.push_back(index.size(d));
  Tensor y = torch::stable::new_empty(x, shape, ScalarType::Float);
  const int64_t* at = chosen.const_data_ptr<int64_t>();
  float* out = y.mutable_data_ptr<float>();
  perform({in.keep, chosen, y}, [=] {
    count_call("columns", "plain");
    for (int64_t i = 0; i < n; i++)
      DASLLAMA_CHECK(at[i] >= 0 && at[i] < in.C, "columns", "index[", i, "] is ", at[i], ", wanted 0 to ", in.C - 1);
    parallel(in.rows, 1 + kGrain / (n + 1), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; r++)
        for (int64_t i = 0; i < n; i++) out[r * n + i] = in.data[r * in.stride + at[i]];
    });
  });
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(dasllama, CPU, m) {
  m.impl("add", TORCH_BOX(&add));
  m.impl("mul", TORCH_BOX(&mul));
  m.impl("copy", TORCH_BOX(&copy));
  m.impl("join", TORCH_BOX(&join));
  m.impl("columns", TORCH_BOX(&columns));
}

}  // namespace dasllama
