#if defined(__x86_64__)
#include "isa_avx512vnni.h"
#include "matmul_int_table.inl"

namespace dasllama {
extern const IntKernels int_kernels_avx512vnni;
const IntKernels int_kernels_avx512vnni = DASLLAMA_INT_TABLE;
}  // namespace dasllama
#endif
