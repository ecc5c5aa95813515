// Binding of dequantize; see ops/dequantize.py. Blocks are independent, so the work is split between any two of them.
#include "packed.h"

namespace dasllama {
namespace {

Tensor dequantize(const Tensor& qweight, int64_t qtype) {
  const TypeInfo type = checked_packed("dequantize", qweight, qtype);
  const Tensor packed = torch::stable::contiguous(qweight);
  Tensor y = torch::stable::new_empty(packed, with_last(packed, packed.size(-1) / type.bytes * type.block),
                                      ScalarType::Float);
  const uint8_t* in = packed.const_data_ptr<uint8_t>();
  float* out = y.mutable_data_ptr<float>();
  const Kernels& k = kernels();
  count_call("dequantize", k.name);
  parallel(packed.numel() / type.bytes, 1 + 16384 / type.block, [&](int64_t begin, int64_t end) {
    k.dequantize(static_cast<int>(qtype), in + begin * type.bytes, (end - begin) * type.block, out + begin * type.block);
  });
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(dasllama, CPU, m) { m.impl("dequantize", TORCH_BOX(&dequantize)); }

}  // namespace dasllama
