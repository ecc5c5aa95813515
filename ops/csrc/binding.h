// What every op's binding needs: tensors of the LibTorch stable ABI, checks that name op and argument, threads.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <optional>
#include <utility>

#include "kernels.h"

namespace dasllama {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Error texts of ops say: op, argument, what was found and what was wanted.
#define DASLLAMA_CHECK(cond, op, ...) STD_TORCH_CHECK(cond, "dasllama::" op ": ", __VA_ARGS__)

// Calls f(begin, end) on pieces of [0, n) on torch's threads; a piece has at least `grain` items. f must not throw.
template <class F>
void parallel(int64_t n, int64_t grain, const F& f) {
  if (n <= 0) return;
  torch::stable::parallel_for(0, n, grain < 1 ? 1 : grain, f);
}

// The tensor as contiguous f32: itself if it is that already.
inline Tensor as_f32(const Tensor& t) {
  Tensor f = t.scalar_type() == ScalarType::Float ? t : torch::stable::to(t, ScalarType::Float);
  return torch::stable::contiguous(f);
}

// f32 result -> the dtype that the op promises.
inline Tensor as_dtype(const Tensor& t, ScalarType dtype) {
  return dtype == ScalarType::Float ? t : torch::stable::to(t, dtype);
}

inline bool is_floating(const Tensor& t) {
  const auto s = t.scalar_type();
  return s == ScalarType::Float || s == ScalarType::Half || s == ScalarType::BFloat16;
}

}  // namespace dasllama
