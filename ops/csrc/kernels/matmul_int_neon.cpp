#if defined(__aarch64__)
#include "isa_neon.h"
#include "matmul_int_table.inl"

namespace dasllama {
extern const IntKernels int_kernels_neon;
const IntKernels int_kernels_neon = DASLLAMA_INT_TABLE;
}  // namespace dasllama
#endif
