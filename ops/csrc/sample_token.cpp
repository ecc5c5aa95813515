// Binding of sample_token; formula in ops/sample_token.py, loops in kernels/sample_token.inl.
#include <algorithm>
#include <vector>

#include "packed.h"
#include "views.h"

namespace dasllama {
namespace {

Tensor sample_token(const Tensor& logits, const Tensor& seen, double repetition_penalty, double presence_penalty,
                    double frequency_penalty, double temp, int64_t top_k, double top_p, double min_p, double draw) {
  DASLLAMA_CHECK(logits.scalar_type() == ScalarType::Float && logits.dim() == 1 && logits.size(0) >= 1 &&
                     logits.size(0) <= INT32_MAX,
                 "sample_token", "logits must be f32 [V] with V >= 1, found ", shape_text(logits));
  DASLLAMA_CHECK(seen.is_cpu() && seen.scalar_type() == ScalarType::Long && seen.dim() == 1, "sample_token",
                 "seen must be int64 [n] on the CPU, found ", shape_text(seen));
  DASLLAMA_CHECK(temp >= 0 && top_k >= 0 && top_p > 0 && top_p <= 1 && min_p >= 0 && min_p <= 1 && draw >= 0 &&
                     draw < 1,
                 "sample_token", "wanted temp >= 0, top_k >= 0, top_p in (0, 1], min_p in [0, 1] and draw in [0, 1), ",
                 "found ", temp, ", ", top_k, ", ", top_p, ", ", min_p, " and ", draw);
  const Tensor in = as_contiguous(logits), history = as_contiguous(seen);
  const int64_t V = in.size(0), n = history.size(0);
  const int64_t* ids = history.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < n; i++)
    DASLLAMA_CHECK(ids[i] >= 0 && ids[i] < V, "sample_token", "id ", ids[i], " of seen is not one of ", V, " logits");

  const auto F = static_cast<size_t>(sample_floats(V)), B = static_cast<size_t>(sample_blocks(V));
  auto* parts = static_cast<SamplePart*>(
      thread_scratch(B * (sizeof(SamplePart) + sizeof(double) + sizeof(int32_t)) + 4 * F * sizeof(float) +
                     static_cast<size_t>(V) * sizeof(int32_t)));
  auto* blocks = reinterpret_cast<double*>(parts + B);
  auto* floats = reinterpret_cast<float*>(blocks + B);
  auto* int32s = reinterpret_cast<int32_t*>(floats + 4 * F);
  std::vector<int64_t> penalized(ids, ids + n);
  std::sort(penalized.begin(), penalized.end());
  std::vector<float> values;
  const auto repetition = static_cast<float>(repetition_penalty);
  auto last = penalized.begin();
  for (auto first = last, next = last; first != penalized.end(); first = next) {
    next = std::upper_bound(first, penalized.end(), *first);
    const float v = in.const_data_ptr<float>()[*first];
    values.push_back((v > 0 ? v / repetition : v * repetition) - static_cast<float>(presence_penalty) -
                     static_cast<float>(frequency_penalty) * static_cast<float>(next - first));
    *last++ = *first;
  }
  const SampleArgs a{in.const_data_ptr<float>(), V, temp, top_k, top_p, min_p, draw,
                     static_cast<int64_t>(values.size()), penalized.data(), values.data(),
                     floats, floats + F, {floats + 2 * F, floats + 3 * F}, int32s, blocks, parts, int32s + V};
  const Kernels& k = kernels();
  count_call("sample_token", k.name);
  Tensor token = torch::stable::new_empty(seen, {}, ScalarType::Long);
  *token.mutable_data_ptr<int64_t>() = k.sample_token(a);
  return token;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(dasllama, CPU, m) { m.impl("sample_token", TORCH_BOX(&sample_token)); }

}  // namespace dasllama
