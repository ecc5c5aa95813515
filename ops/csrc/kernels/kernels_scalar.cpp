// Plain C++ for any processor: the kernels that serve all that the schemas allow.
#include "../kernels.h"
#include "table.inl"

namespace dasllama {
extern const Kernels kernels_scalar;
const Kernels kernels_scalar = {"scalar", rms_norm, rms_norm_backward, dequantize, embedding, quantize_activation, quantize,
                                matmul_float, matmul_float_backward, round_floats, int_traits, prepare_activation, matmul_int};
}  // namespace dasllama
