// Plain C++ for any processor: the kernels that serve all that the schemas allow.
#include "../kernels.h"
#include "table.inl"

namespace dasllama {
extern const Kernels kernels_scalar;
const Kernels kernels_scalar = {"scalar", rms_norm, rms_norm_backward, int_traits, prepare_activation, matmul_int};
}  // namespace dasllama
