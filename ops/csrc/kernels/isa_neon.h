// NEON with the dot products of Armv8.2. The pragmas give every function below them this target; files are built without
// -m flags. Included before all else.
#define DASLLAMA_ISA_NEON
#include <arm_neon.h>

#include <type_traits>

#include "../matmul_int.h"
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif
