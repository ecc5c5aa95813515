#if defined(__x86_64__)
#include "isa_avx512vnni.h"
#include "table.inl"

namespace dasllama {
extern const IntKernels int_kernels_avx512vnni;
extern const Kernels kernels_avx512vnni;
const Kernels kernels_avx512vnni = DASLLAMA_TABLE("avx512vnni", &int_kernels_avx512vnni);
}  // namespace dasllama
#endif
