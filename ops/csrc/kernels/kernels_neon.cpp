#if defined(__aarch64__)
#include "isa_neon.h"
#include "table.inl"

namespace dasllama {
extern const IntKernels int_kernels_neon;
extern const Kernels kernels_neon;
const Kernels kernels_neon = DASLLAMA_TABLE("neon", &int_kernels_neon);
}  // namespace dasllama
#endif
