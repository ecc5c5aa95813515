// The kernels of one instruction set, in the order of struct Kernels. Included by kernels_<isa>.cpp.
#include "../blocks.h"
#include "lanes.h"
#include "lanes_math.h"

namespace dasllama {
namespace {
#include "blocks.inl"
#include "quantize.inl"
#include "rms_norm.inl"
#include "rope.inl"
#include "gated_act.inl"
#include "kv_write.inl"
#include "attention.inl"
#include "attention_backward.inl"
}  // namespace
}  // namespace dasllama
