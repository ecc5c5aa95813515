#if defined(__x86_64__)
#include "isa_avx2.h"
#include "table.inl"

namespace dasllama {
extern const IntKernels int_kernels_avx2;
extern const Kernels kernels_avx2;
const Kernels kernels_avx2 = DASLLAMA_TABLE("avx2", &int_kernels_avx2);
}  // namespace dasllama
#endif
