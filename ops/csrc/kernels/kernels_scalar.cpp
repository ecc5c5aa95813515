// Plain C++ for any processor: the kernels that serve all that the schemas allow.
#include "../kernels.h"
#include "table.inl"

namespace dasllama {
extern const Kernels kernels_scalar;
const Kernels kernels_scalar = {
    "scalar",
    rms_norm,
    rms_norm_backward,
    dequantize,
    embedding,
    quantize_activation,
    quantize,
    rope_tables,
    rope,
    gated_act,
    gated_act_backward,
    kv_write,
    attention_split,
    attention_merge,
    attention_finish,
    attention_backward_q,
    attention_backward_kv,
};
}  // namespace dasllama
