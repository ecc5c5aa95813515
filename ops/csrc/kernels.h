// The table of CPU kernels: one function pointer per kernel, one table per instruction set. Nothing here knows torch.
//
// A kernel works on raw pointers and on a range of its outermost loop, so that the caller may split it over threads;
// its result does not depend on the split. Every table is total: it serves all that the ops' schemas allow.
// The standard headers come here, before a target pragma: a template that std shares between files must not be compiled
// for an instruction set that only some processors have. For the same reason kernels use no containers.
// The same source (kernels/*.inl) is compiled once per instruction set unless a kernel has an own, faster variant.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace dasllama {

// y[m, n] = sum over k of x[m, k] * w[n, k], + bias[n]: f32 with strides in elements, w packed rows of type qtype.
struct FloatMatmul {
  const float* x;
  int64_t x_stride;
  const uint8_t* w;
  int64_t row_bytes;
  int qtype;
  const float* bias;  // [N] or null
  float* y;
  int64_t y_stride;
  int64_t M, K;
};

// dx[m, k] = sum over n of grad[m, n] * w[n, k]: contiguous f32, w packed rows of type qtype.
struct FloatMatmulBackward {
  const float* grad;
  const uint8_t* w;
  int64_t row_bytes;
  int qtype;
  float* dx;
  int64_t M, N, K;
};

struct Kernels {
  const char* name;  // "scalar", "avx2", "avx512vnni"

  // y[i] = x[i] / sqrt(mean(x[i]^2) + eps) * weight for rows [begin, end); strides in elements, weight may be null.
  void (*rms_norm)(const float* x, int64_t x_stride, const float* weight, float eps, int64_t C, float* y,
                   int64_t begin, int64_t end);
  void (*rms_norm_backward)(const float* grad, const float* x, const float* weight, float eps, int64_t C, float* dx,
                            int64_t begin, int64_t end);

  // n elements (a whole number of blocks) of any weight type -> f32.
  void (*dequantize)(int qtype, const uint8_t* src, int64_t n, float* y);
  // y[i] = row ids[i] of a packed table, dequantized, times scale, for i in [begin, end); ids are valid.
  void (*embedding)(int qtype, const uint8_t* table, int64_t row_bytes, const int64_t* ids, float scale, int64_t C,
                    float* y, int64_t begin, int64_t end);

  // Rows [begin, end) of x [rows, K] -> blocks of the lattice Q8_0, Q8_1 or Q8_K, row_bytes per row.
  void (*quantize_activation)(int lattice, const float* x, int64_t K, uint8_t* out, int64_t row_bytes, int64_t begin,
                              int64_t end);
  // n elements (a whole number of blocks) -> F32, F16, BF16, Q8_0 or Q4_0.
  void (*quantize)(int qtype, const float* x, int64_t n, uint8_t* out);

  // Weight rows [begin, end).
  void (*matmul_float)(const FloatMatmul& p, int64_t begin, int64_t end);
  // Columns [begin, end) of dx; begin is a multiple of the type's block, and end too unless it is K.
  void (*matmul_float_backward)(const FloatMatmulBackward& p, int64_t begin, int64_t end);
  // y[i] = x[i] rounded to qtype, one of F32, F16 and BF16, for i in [begin, end); y may be x.
  void (*round_floats)(int qtype, const float* x, float* y, int64_t begin, int64_t end);
};

// The table in force: the best one that this processor runs, or the one that dasllama_set_isa asked for.
const Kernels& kernels();

// Counts one call of `op` served by `variant` (both string literals) for dasllama_report.
void count_call(const char* op, const char* variant);

}  // namespace dasllama
