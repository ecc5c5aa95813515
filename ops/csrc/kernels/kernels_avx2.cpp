// AVX2 + FMA + F16C. The pragma gives every function below these targets; the file itself is built without -m flags.
#if defined(__x86_64__)
#define DASLLAMA_ISA_AVX2  // GCC before 13 keeps __AVX2__ undefined under the pragma in C++
#include <immintrin.h>

#include <type_traits>

#include "../kernels.h"
#pragma GCC target("avx2,fma,f16c")
#include "table.inl"

namespace dasllama {
extern const Kernels kernels_avx2;
const Kernels kernels_avx2 = DASLLAMA_TABLE("avx2");
}  // namespace dasllama
#endif
