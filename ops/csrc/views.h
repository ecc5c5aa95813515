// Tensors as kernels read them: f32 rows whose last dimension is contiguous, the leading dimensions flattened.
#pragma once
#include <initializer_list>
#include <vector>

#include "binding.h"

namespace dasllama {

// Whether the dimensions [0, n) of t can be walked as one dimension with the stride of the last of them.
inline bool flattens(const Tensor& t, int64_t n) {
  for (int64_t d = n - 2; d >= 0; d--)
    if (t.size(d) != 1 && t.stride(d) != t.stride(d + 1) * t.size(d + 1)) return false;
  return true;
}

// Product of the first n sizes.
inline int64_t leading(const Tensor& x, int64_t n) {
  int64_t rows = 1;
  for (int64_t d = 0; d < n; d++) rows *= x.size(d);
  return rows;
}

// x [..., H, D] as T rows of H x D elements; a copy only where dtype or strides ask for one.
struct HeadRows {
  Tensor keep;
  const float* data;
  int64_t T, H, D, row_stride, head_stride;

  explicit HeadRows(const Tensor& x)
      : keep(x.scalar_type() == ScalarType::Float && x.stride(-1) == 1 && flattens(x, x.dim() - 2) ? x : as_f32(x)),
        data(keep.const_data_ptr<float>()),
        T(leading(x, x.dim() - 2)),
        H(x.size(-2)),
        D(x.size(-1)),
        row_stride(x.dim() > 2 ? keep.stride(-3) : H * D),
        head_stride(keep.stride(-2)) {}
};

// x [..., C] as rows of C elements.
struct Rows {
  Tensor keep;
  const float* data;
  int64_t rows, C, stride;

  explicit Rows(const Tensor& x)
      : keep(x.scalar_type() == ScalarType::Float && x.stride(-1) == 1 && flattens(x, x.dim() - 1) ? x : as_f32(x)),
        data(keep.const_data_ptr<float>()),
        rows(leading(x, x.dim() - 1)),
        C(x.size(-1)),
        stride(x.dim() > 1 ? keep.stride(-2) : C) {}
};

// A new contiguous tensor of x's device: x's leading dimensions up to `keep`, then `tail`.
inline Tensor new_like(const Tensor& x, int64_t keep, std::initializer_list<int64_t> tail, ScalarType dtype) {
  std::vector<int64_t> shape;
  for (int64_t d = 0; d < keep; d++) shape.push_back(x.size(d));
  shape.insert(shape.end(), tail);
  return torch::stable::new_empty(x, shape, dtype);
}

}  // namespace dasllama
