// The kernels of one instruction set, and DASLLAMA_TABLE, which lists them in the order of struct Kernels. Included by
// kernels_<isa>.cpp.
#include <numeric>

#include "../blocks.h"
#include "../kernels.h"
#include "lanes.h"
#include "lanes_math.h"
#if !defined(DASLLAMA_ISA_SCALAR)
#include "blocks_simd.h"
#endif

namespace dasllama {
namespace {
#include "blocks.inl"
#include "vectors.inl"
#include "quantize.inl"
#include "rms_norm.inl"
#include "rope.inl"
#include "gated_act.inl"
#include "moe_router.inl"
#include "moe_combine.inl"
#include "softcap.inl"
#include "sample_token.inl"
#include "ceilings.inl"
#include "kv_rotation.inl"
#include "kv_codecs.inl"
#include "attention_rows.inl"
#include "attention_values.inl"
#include "attention_scores.inl"
#include "attention.inl"
#include "attention_backward.inl"
#include "causal_conv1d.inl"
#include "delta_gates.inl"
#include "gated_delta_rule.inl"
#include "prepare_activation.inl"
namespace int_dot {  // has vectors of its own
#include "decode_row.inl"
}  // namespace int_dot
using int_dot::decode_row;
#include "matmul_float.inl"
#include "matmul_float_backward.inl"
}  // namespace
}  // namespace dasllama

#define DASLLAMA_TABLE(name, integer)   \
  {                                     \
    name,                               \
    rms_norm,                           \
    rms_norm_backward,                  \
    dequantize,                         \
    embedding,                          \
    quantize_activation,                \
    quantize,                           \
    rope_tables,                        \
    rope,                               \
    gated_act,                          \
    gated_act_backward,                 \
    moe_router,                         \
    moe_router_backward,                \
    moe_combine,                        \
    moe_combine_backward,               \
    softcap,                            \
    softcap_backward,                   \
    sample_token,                       \
    read_ceiling,                       \
    fma_ceiling,                        \
    dot_ceiling,                        \
    kv_write,                           \
    kv_read,                            \
    attention_queries,                  \
    attention_split,                    \
    attention_merge,                    \
    attention_finish,                   \
    attention_backward_q,               \
    attention_backward_kv,              \
    causal_conv1d,                      \
    causal_conv1d_backward,             \
    delta_gates,                        \
    delta_gates_backward,               \
    gated_delta_rule,                   \
    gated_delta_rule_backward,          \
    matmul_float,                       \
    matmul_float_backward,              \
    round_floats,                       \
    prepare_activation,                 \
    integer                             \
  }
