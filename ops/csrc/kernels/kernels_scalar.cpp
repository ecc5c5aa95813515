#include "isa_scalar.h"
#include "table.inl"

namespace dasllama {
extern const IntKernels int_kernels_scalar;
extern const Kernels kernels_scalar;
const Kernels kernels_scalar = DASLLAMA_TABLE("scalar", &int_kernels_scalar);
}  // namespace dasllama
