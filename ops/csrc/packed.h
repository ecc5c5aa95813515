// Checks that ops on packed tensors share. Their texts say op, argument, what was found and what was wanted.
#pragma once
#include <string>
#include <vector>

#include "binding.h"
#include "generated/ggml_types.h"

namespace dasllama {

inline std::string shape_text(const Tensor& t) {
  std::string text = "[";
  for (int64_t i = 0; i < t.dim(); i++) text += (i ? ", " : "") + std::to_string(t.size(i));
  return text + "]";
}

// t's shape with the last dimension replaced.
inline std::vector<int64_t> with_last(const Tensor& t, int64_t last) {
  std::vector<int64_t> shape;
  for (int64_t i = 0; i + 1 < t.dim(); i++) shape.push_back(t.size(i));
  shape.push_back(last);
  return shape;
}

// The row of a weight type.
inline TypeInfo weight_type(const char* op, int64_t qtype) {
  const TypeInfo type = qtype >= 0 && qtype < 1024 ? type_info(static_cast<int>(qtype)) : TypeInfo{nullptr, 0, 0, -1};
  STD_TORCH_CHECK(type.name, "dasllama::", op, ": qtype ", qtype, " is unknown");
  STD_TORCH_CHECK(type.lattice >= 0, "dasllama::", op, ": qtype ", qtype, " (", type.name, ") is no weight type");
  return type;
}

// The type of qweight u8 [..., row_bytes] on the CPU, whose rows are whole blocks.
inline TypeInfo checked_packed(const char* op, const Tensor& qweight, int64_t qtype) {
  const TypeInfo type = weight_type(op, qtype);
  STD_TORCH_CHECK(qweight.is_cpu(), "dasllama::", op, ": qweight must be on the CPU like the other arguments");
  STD_TORCH_CHECK(
      qweight.scalar_type() == ScalarType::Byte && qweight.dim() >= 1 && qweight.size(-1) % type.bytes == 0, "dasllama::",
      op, ": qweight must be uint8 [..., a multiple of ", type.bytes, "] for ", type.name, ", found ",
      qweight.scalar_type() == ScalarType::Byte ? "" : "another dtype ", shape_text(qweight));
  return type;
}

// The same for a matrix [N, row_bytes] that kernels address in place.
inline TypeInfo checked_matrix(const char* op, const Tensor& qweight, int64_t qtype) {
  const TypeInfo type = checked_packed(op, qweight, qtype);
  STD_TORCH_CHECK(qweight.dim() == 2 && qweight.is_contiguous(), "dasllama::", op,
                  ": qweight must be a contiguous [N, row_bytes], found ", qweight.is_contiguous() ? "" : "strided ",
                  shape_text(qweight));
  return type;
}

}  // namespace dasllama
