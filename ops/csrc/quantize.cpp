// Bindings of quantize_activation (ops/lattices.py) and quantize (ops/quantize.py).
#include "packed.h"

namespace dasllama {
namespace {

Tensor quantize_activation(const Tensor& x, int64_t lattice) {
  constexpr const char* op = "quantize_activation";
  STD_TORCH_CHECK(x.is_cpu() && is_floating(x) && x.dim() >= 1, "dasllama::", op,
                  ": x must be f32, f16 or bf16 of rank 1 or more on the CPU");
  ScalarType dtype = ScalarType::Byte;
  switch (lattice) {
    case types::F32: dtype = ScalarType::Float; break;
    case types::F16: dtype = ScalarType::Half; break;
    case types::BF16: dtype = ScalarType::BFloat16; break;
    case types::Q8_0:
    case types::Q8_1:
    case types::Q8_K: break;
    default: STD_TORCH_CHECK(false, "dasllama::", op, ": type ", lattice, " is not a lattice");
  }
  const Kernels& k = kernels();
  count_call(op, k.name);
  if (dtype != ScalarType::Byte) {
    Tensor y = torch::stable::new_empty(x, with_last(x, x.size(-1)), dtype);
    torch::stable::copy_(y, x);
    return y;
  }
  const TypeInfo type = type_info(static_cast<int>(lattice));
  const int64_t K = x.size(-1);
  STD_TORCH_CHECK(K % type.block == 0, "dasllama::", op, ": x must be [..., a multiple of ", type.block, "] for ",
                  type.name, ", found ", shape_text(x));
  const Tensor x32 = as_f32(x);
  const int64_t row_bytes = K / type.block * type.bytes;
  Tensor y = torch::stable::new_empty(x32, with_last(x, row_bytes), ScalarType::Byte);
  const float* in = x32.const_data_ptr<float>();
  uint8_t* out = y.mutable_data_ptr<uint8_t>();
  parallel(K ? x.numel() / K : 0, 1 + 16384 / (K + 1), [&](int64_t begin, int64_t end) {
    k.quantize_activation(static_cast<int>(lattice), in, K, out, row_bytes, begin, end);
  });
  return y;
}

Tensor quantize(const Tensor& x, int64_t qtype) {
  constexpr const char* op = "quantize";
  switch (qtype) {
    case types::F32:
    case types::F16:
    case types::BF16:
    case types::Q4_0:
    case types::Q8_0: break;
    default:
      STD_TORCH_CHECK(false, "dasllama::", op, ": cannot pack to type ", weight_type(op, qtype).name,
                      "; possible: F32, F16, BF16, Q4_0, Q8_0");
  }
  const TypeInfo type = weight_type(op, qtype);
  STD_TORCH_CHECK(
      x.is_cpu() && x.scalar_type() == ScalarType::Float && x.dim() >= 1 && x.size(-1) % type.block == 0, "dasllama::",
      op, ": x must be float32 [..., a multiple of ", type.block, "] for ", type.name, ", found ",
      x.scalar_type() == ScalarType::Float ? "" : "another dtype ", shape_text(x));
  const Tensor x32 = torch::stable::contiguous(x);
  Tensor y = torch::stable::new_empty(x32, with_last(x, x.size(-1) / type.block * type.bytes), ScalarType::Byte);
  const float* in = x32.const_data_ptr<float>();
  uint8_t* out = y.mutable_data_ptr<uint8_t>();
  const Kernels& k = kernels();
  count_call(op, k.name);
  parallel(x.numel() / type.block, 1 + 16384 / type.block, [&](int64_t begin, int64_t end) {
    k.quantize(static_cast<int>(qtype), in + begin * type.block, (end - begin) * type.block, out + begin * type.bytes);
  });
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(dasllama, CPU, m) {
  m.impl("quantize_activation", TORCH_BOX(&quantize_activation));
  m.impl("quantize", TORCH_BOX(&quantize));
}

}  // namespace dasllama
