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
#include "program.h"
#include "team.h"

namespace dasllama {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Error texts of ops say: op, argument, what was found and what was wanted.
#define DASLLAMA_CHECK(cond, op, ...) STD_TORCH_CHECK(cond, "dasllama::" op ": ", __VA_ARGS__)

// Calls f(begin, end) on pieces of [0, n), on torch's threads or in a running program on its team's; a piece has at least
// `grain` items. f must not throw.
template <class F>
void parallel(int64_t n, int64_t grain, const F& f) {
  if (n <= 0) return;
  if (grain < 1) grain = 1;
  if (Program* program = recording()) program->shared |= n > grain;
  if (Team* team = Team::current())
    team->run(n, grain, [](int64_t b, int64_t e, const void* f) { (*static_cast<const F*>(f))(b, e); }, &f);
  else
    torch::stable::parallel_for(0, n, grain, f);
}

// Threads that `parallel` may use.
inline int64_t available_threads() {
  const Team* team = Team::current();
  return team ? team->threads() : torch::stable::get_num_threads();
}

// The tensor in another dtype, or itself. A conversion is not recorded.
inline Tensor as_dtype(const Tensor& t, ScalarType dtype) {
  if (t.scalar_type() == dtype) return t;
  not_recorded("a tensor is converted to another dtype");
  return torch::stable::to(t, dtype);
}

// A contiguous copy of f32 (elementwise.cpp).
Tensor copy(const Tensor& x);

// The tensor, or a contiguous copy. Only copies of f32 are recorded.
inline Tensor as_contiguous(const Tensor& t) {
  if (t.is_contiguous()) return t;
  if (recording() && t.scalar_type() == ScalarType::Float) return copy(t);
  not_recorded("a strided tensor is copied");
  return torch::stable::contiguous(t);
}

// The tensor as contiguous f32: itself if it is that already.
inline Tensor as_f32(const Tensor& t) { return as_contiguous(as_dtype(t, ScalarType::Float)); }

inline bool is_floating(const Tensor& t) {
  const auto s = t.scalar_type();
  return s == ScalarType::Float || s == ScalarType::Half || s == ScalarType::BFloat16;
}

}  // namespace dasllama
