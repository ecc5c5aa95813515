// Binding of embedding; see ops/embedding.py. All ids are checked before the first row is read.
#include "packed.h"

namespace dasllama {
namespace {

Tensor embedding(const Tensor& ids, const Tensor& qweight, int64_t qtype, double scale) {
  const TypeInfo type = checked_matrix("embedding", qweight, qtype);
  DASLLAMA_CHECK(ids.is_cpu() && (ids.scalar_type() == ScalarType::Long || ids.scalar_type() == ScalarType::Int),
                 "embedding", "ids must be int64 or int32 on the CPU like qweight");
  const Tensor ids64 = as_contiguous(as_dtype(ids, ScalarType::Long));
  const int64_t n = ids64.numel(), V = qweight.size(0), row_bytes = qweight.size(1);
  const int64_t C = row_bytes / type.bytes * type.block;
  const int64_t* chosen = ids64.const_data_ptr<int64_t>();
  std::vector<int64_t> shape;
  for (int64_t i = 0; i < ids.dim(); i++) shape.push_back(ids.size(i));
  shape.push_back(C);
  Tensor y = torch::stable::new_empty(ids64, shape, ScalarType::Float);
  const uint8_t* table = qweight.const_data_ptr<uint8_t>();
  float* out = y.mutable_data_ptr<float>();
  perform({ids64, qweight, y}, [=] {
    for (int64_t i = 0; i < n; i++)
      DASLLAMA_CHECK(chosen[i] >= 0 && chosen[i] < V, "embedding", "id ", chosen[i], " is outside the table of ", V,
                     " rows");
    const Kernels& k = kernels();
    count_call("embedding", k.name);
    parallel(n, 1 + 16384 / (C + 1), [&](int64_t begin, int64_t end) {
      k.embedding(static_cast<int>(qtype), table, row_bytes, chosen, static_cast<float>(scale), C, out, begin, end);
    });
  });
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(dasllama, CPU, m) { m.impl("embedding", TORCH_BOX(&embedding)); }

}  // namespace dasllama
