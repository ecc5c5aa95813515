// AVX2 + FMA + F16C. The pragma gives every function below these targets; the file itself is built without -m flags.
#if defined(__x86_64__)
#include <immintrin.h>

#include "../kernels.h"
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#include "table.inl"
#pragma GCC pop_options

namespace dasllama {
extern const Kernels kernels_avx2;
const Kernels kernels_avx2 = {
    "avx2",
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
#endif
