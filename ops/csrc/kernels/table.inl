// The kernels of one instruction set, in the order of struct Kernels. Included by kernels_<isa>.cpp.
#include "../blocks.h"
#include "fma_lanes.h"
#include "lanes.h"

namespace dasllama {
namespace {
#include "blocks.inl"
#include "quantize.inl"
#include "rms_norm.inl"
#include "matmul_float.inl"
#include "matmul_float_backward.inl"
}  // namespace
}  // namespace dasllama
