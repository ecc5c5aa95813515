// AVX2 + FMA + F16C. The pragma gives every function below it these targets; files are built without -m flags. Included
// before all else.
#define DASLLAMA_ISA_AVX2  // GCC before 13 keeps __AVX2__ undefined under the pragma in C++
#include <immintrin.h>

#include <type_traits>

#include "../matmul_int.h"
#pragma GCC target("avx2,fma,f16c")
