// AVX-512 with VNNI. The pragma gives every function below it these targets; files are built without -m flags. Included
// before all else.
#define DASLLAMA_ISA_AVX512  // and all that AVX2 has; GCC before 13 keeps __AVX512F__ undefined under the pragma in C++
#define DASLLAMA_ISA_AVX2
#include <immintrin.h>

#include <type_traits>

#include "../matmul_int.h"
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")
