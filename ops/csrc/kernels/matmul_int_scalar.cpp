#include "isa_scalar.h"
#include "matmul_int_table.inl"

namespace dasllama {
extern const IntKernels int_kernels_scalar;
const IntKernels int_kernels_scalar = DASLLAMA_INT_TABLE;
}  // namespace dasllama
