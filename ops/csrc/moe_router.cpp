// Binding of moe_router and moe_router_backward; formulas in ops/moe_router.py, loops in kernels/moe_router.inl.
#include "packed.h"
#include "views.h"

namespace dasllama {
namespace {

constexpr int64_t kTask = 16384;  // logits for which a thread is worth waking

std::tuple<Tensor, Tensor> moe_router(const Tensor& logits, const std::optional<Tensor>& bias, int64_t top_k,
                                      int64_t gate, bool renormalize, double scale) {
  DASLLAMA_CHECK(is_floating(logits) && logits.dim() >= 1 && top_k >= 1 && top_k <= logits.size(-1), "moe_router",
                 "logits must be f32, f16 or bf16 [..., E] with E >= top_k = ", top_k, " >= 1, found ",
                 shape_text(logits));
  DASLLAMA_CHECK(gate == 0 || gate == 1, "moe_router", "gate must be 0 (softmax) or 1 (sigmoid), found ", gate);
  const int64_t E = logits.size(-1);
  DASLLAMA_CHECK(!bias || (gate == 1 && bias->is_cpu() && bias->scalar_type() == ScalarType::Float &&
                           bias->dim() == 1 && bias->size(0) == E && bias->is_contiguous()),
                 "moe_router", "bias must be contiguous f32 [", E, "] on the CPU and the gate sigmoid, found ",
                 shape_text(*bias), " and gate ", gate);
  const Rows in(logits);
  Tensor weights = new_like(logits, logits.dim() - 1, {top_k}, ScalarType::Float);
  Tensor ids = new_like(logits, logits.dim() - 1, {top_k}, ScalarType::Long);
  float* to_weights = weights.mutable_data_ptr<float>();
  int64_t* to_ids = ids.mutable_data_ptr<int64_t>();
  const float* b = bias ? bias->const_data_ptr<float>() : nullptr;
  perform({in.keep, bias ? *bias : in.keep, weights, ids}, [=] {
    const Kernels& k = kernels();
    count_call("moe_router", k.name);
    parallel(in.rows, 1 + kTask / E, [&](int64_t begin, int64_t end) {
      k.moe_router(in.data, in.stride, b, E, top_k, gate, renormalize, static_cast<float>(scale), to_weights, to_ids,
                   begin, end);
    });
  });
  return {weights, ids};
}

Tensor moe_router_backward(const Tensor& grad, const Tensor& logits, const Tensor& ids, int64_t gate, bool renormalize,
                           double scale) {
  DASLLAMA_CHECK(is_floating(logits) && logits.dim() >= 1 && is_floating(grad) && grad.dim() == logits.dim() &&
                     ids.is_cpu() && ids.scalar_type() == ScalarType::Long && ids.dim() == logits.dim(),
                 "moe_router_backward", "logits and grad must be floating, ids int64 on the CPU, all of one rank");
  for (int64_t d = 0; d < grad.dim(); d++)
    DASLLAMA_CHECK(grad.size(d) == ids.size(d) && (d + 1 == grad.dim() || grad.size(d) == logits.size(d)),
                   "moe_router_backward", "grad, ids and logits must have shapes that agree, found ", shape_text(grad),
                   ", ", shape_text(ids), " and ", shape_text(logits));
  DASLLAMA_CHECK(gate == 0 || gate == 1, "moe_router_backward", "gate must be 0 (softmax) or 1 (sigmoid), found ",
                 gate);
  const int64_t E = logits.size(-1), top_k = ids.size(-1), rows = leading(logits, logits.dim() - 1);
  const Tensor g32 = as_f32(grad), l32 = as_f32(logits), chosen = torch::stable::contiguous(ids);
  const int64_t* id = chosen.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < rows * top_k; i++)
    DASLLAMA_CHECK(id[i] >= 0 && id[i] < E, "moe_router_backward", "id ", id[i], " is not one of ", E, " experts");
  Tensor dlogits = new_like(logits, logits.dim(), {}, ScalarType::Float);
  const float *g = g32.const_data_ptr<float>(), *l = l32.const_data_ptr<float>();
  float* out = dlogits.mutable_data_ptr<float>();
  const Kernels& k = kernels();
  count_call("moe_router_backward", k.name);
  parallel(rows, 1 + kTask / (E + 1), [&](int64_t begin, int64_t end) {
    k.moe_router_backward(g, l, id, E, top_k, gate, renormalize, static_cast<float>(scale), out, begin, end);
  });
  return as_dtype(dlogits, logits.scalar_type());
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(dasllama, CPU, m) {
  m.impl("moe_router", TORCH_BOX(&moe_router));
  m.impl("moe_router_backward", TORCH_BOX(&moe_router_backward));
}

}  // namespace dasllama
