// The integer matmul of one instruction set, and DASLLAMA_INT_TABLE, which lists it in the order of struct IntKernels.
// Included by matmul_int_<isa>.cpp.
#include "../blocks.h"
#include "lanes.h"
#if !defined(DASLLAMA_ISA_SCALAR)
#include "sources_simd.h"
#endif

namespace dasllama {
namespace {
namespace int_dot {
#if !defined(DASLLAMA_ISA_SCALAR)
#include "matmul_int.inl"
#else
#include "matmul_int_scalar.inl"
#endif
}  // namespace int_dot
}  // namespace
}  // namespace dasllama

#define DASLLAMA_INT_TABLE \
  { int_dot::int_traits, int_dot::matmul_int }
