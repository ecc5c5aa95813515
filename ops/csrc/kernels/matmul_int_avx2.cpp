#if defined(__x86_64__)
#include "isa_avx2.h"
#include "matmul_int_table.inl"

namespace dasllama {
extern const IntKernels int_kernels_avx2;
const IntKernels int_kernels_avx2 = DASLLAMA_INT_TABLE;
}  // namespace dasllama
#endif
