// AVX-512 with VNNI. The pragma gives every function below these targets; the file itself is built without -m flags.
#if defined(__x86_64__)
#define DASLLAMA_ISA_AVX512  // and all that AVX2 has; GCC before 13 keeps __AVX512F__ undefined under the pragma in C++
#define DASLLAMA_ISA_AVX2
#include <immintrin.h>

#include <type_traits>

#include "../kernels.h"
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")
#include "table.inl"

namespace dasllama {
extern const Kernels kernels_avx512vnni;
const Kernels kernels_avx512vnni = DASLLAMA_TABLE("avx512vnni");
}  // namespace dasllama
#endif
