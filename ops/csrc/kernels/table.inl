// The kernels of one instruction set, in the order of struct Kernels. Included by kernels_<isa>.cpp.
#include "../blocks.h"
#include "lanes.h"

namespace dasllama {
namespace {
#include "blocks.inl"
#include "quantize.inl"
#include "rms_norm.inl"
}  // namespace
}  // namespace dasllama
