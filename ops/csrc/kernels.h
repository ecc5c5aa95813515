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

// How the integer matmul of one instruction set wants a type's activation: sums are over `group` elements, and weights
// are multiplied as weight + bias, which the sums take back. A task's first weight row is a multiple of `strip`.
struct IntTraits {
  int group, bias, strip;
};

// M rows of K elements on an integer lattice, row-major. U is 256 on Q8_K and else 32, G the group of IntTraits.
struct IntActivation {
  int8_t* q;      // [M, K]
  float* d;       // [M, K / U]
  float* s;       // [M, K / 32] on Q8_1, else unused
  int16_t* sums;  // [M, K / G]: of q
  int32_t* init;  // [M, K / G]: -bias * sums
};

// y[m, n] = x[m] . w[n] (+ bias[n]) in the order of ops/quant_linear.py; w is [N, row_bytes] of a packed type, y [M, N].
struct IntMatmul {
  IntActivation x;
  const uint8_t* w;
  int64_t row_bytes;
  int qtype;
  const float* bias;  // [N] or null
  float* y;
  int64_t N, K;
};

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

  IntTraits (*int_traits)(int qtype);
  // Rows [begin, end) of x f32 [M, K]: rounds them to a lattice and fills their part of a.
  void (*prepare_activation)(const float* x, int lattice, IntTraits traits, int64_t K, const IntActivation& a,
                             int64_t begin, int64_t end);
  // Weight rows [n_begin, n_end) times rows [m_begin, m_end) of x.
  void (*matmul_int)(const IntMatmul& p, int64_t n_begin, int64_t n_end, int64_t m_begin, int64_t m_end);
};

// The table in force: the best one that this processor runs, or the one that dasllama_set_isa asked for.
const Kernels& kernels();

// At least `bytes` bytes, aligned to 64, that belong to the calling thread until it asks again.
void* thread_scratch(size_t bytes);

// Counts one call of `op` served by `variant` (both string literals) for dasllama_report.
void count_call(const char* op, const char* variant);

}  // namespace dasllama
