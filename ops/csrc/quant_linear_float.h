// The part of quant_linear that multiplies floats: every weight type with native=False, and F32, F16 and BF16 in both
// modes. Loops in kernels/matmul_float.inl.
#pragma once
#include <algorithm>

#include "binding.h"
#include "generated/ggml_types.h"

namespace dasllama {

// x f32 [M, K] contiguous, qweight u8 [N, row_bytes] contiguous of type qtype, bias f32 [N] or none; y f32 [M, N] is
// written. native rounds the activation to the weight's float type first. The caller has checked all shapes and dtypes.
inline void quant_linear_float(const Tensor& x, const Tensor& qweight, int qtype,
                               const std::optional<Tensor>& bias, bool native, Tensor& y, int64_t M, int64_t N,
                               int64_t K) {
  FloatMatmul p = {x.const_data_ptr<float>(),
                   K,
                   qweight.const_data_ptr<uint8_t>(),
                   qweight.size(1),
                   qtype,
                   bias ? bias->const_data_ptr<float>() : nullptr,
                   y.mutable_data_ptr<float>(),
                   N,
                   M,
                   K,
                   nullptr};
  std::optional<Tensor> rounded;
  const float* in = p.x;
  float* to = nullptr;
  if (native && qtype != types::F32) {
    rounded = torch::stable::empty_like(x);
    p.x = to = rounded->mutable_data_ptr<float>();
  }
  perform({x, qweight, bias ? *bias : x, y, rounded ? *rounded : x}, [=] {
    const Kernels& k = kernels();
    count_call("quant_linear", k.name);
    if (to)
      parallel(M * K, 1 << 16, [&](int64_t begin, int64_t end) { k.round_floats(qtype, in, to, begin, end); });
    // Groups of 4 rows, so that no thread ends inside a tile; at least 64 k products, which outweigh the hand-over.
    const int64_t group = 4, work = group * std::max<int64_t>(K, 1) * std::clamp<int64_t>(M, 1, 1 << 16);
    parallel((N + group - 1) / group, 1 + (1 << 16) / work, [&](int64_t begin, int64_t end) {
      k.matmul_float(p, begin * group, std::min(end * group, N));
    });
  });
}

}  // namespace dasllama
