// The kernels of one instruction set, in the order of struct Kernels. Included by kernels_<isa>.cpp.
#include "../blocks.h"
#include "fma_lanes.h"
#include "lanes.h"
#if defined(DASLLAMA_ISA_AVX512)
#include "simd_avx512.h"
#include "sources_simd.h"
#elif defined(DASLLAMA_ISA_AVX2)
#include "simd_avx2.h"
#include "sources_simd.h"
#endif

namespace dasllama {
namespace {
#include "blocks.inl"
#include "quantize.inl"
#include "rms_norm.inl"
#include "matmul_float.inl"
#include "matmul_float_backward.inl"
#include "prepare_activation.inl"
#if defined(DASLLAMA_ISA_AVX512) || defined(DASLLAMA_ISA_AVX2)
#include "matmul_int.inl"
#else
#include "matmul_int_scalar.inl"
#endif
}  // namespace
}  // namespace dasllama
