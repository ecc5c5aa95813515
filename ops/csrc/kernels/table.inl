// The kernels of one instruction set, in the order of struct Kernels. Included by kernels_<isa>.cpp.
#include "lanes.h"

namespace dasllama {
namespace {
#include "rms_norm.inl"
}  // namespace
}  // namespace dasllama
