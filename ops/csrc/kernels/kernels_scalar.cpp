// Plain C++ for any processor: the kernels that serve all that the schemas allow.
#include "../kernels.h"
#include "table.inl"

namespace dasllama {
extern const Kernels kernels_scalar;
const Kernels kernels_scalar = DASLLAMA_TABLE("scalar");
}  // namespace dasllama
