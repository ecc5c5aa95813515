// NEON with the dot products of Armv8.2. The pragma gives every function below it this target; files are built without
// -m flags. Clang, which ignores it, has dot products where it compiles for Apple's processors. Included before all
// else.
#define DASLLAMA_ISA_NEON
#include <arm_neon.h>

#include <type_traits>

#include "../matmul_int.h"
#pragma GCC target("arch=armv8.2-a+dotprod")
