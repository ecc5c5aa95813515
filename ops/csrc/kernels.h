// The table of CPU kernels: one function pointer per kernel, one table per instruction set. Nothing here knows torch.
//
// A kernel works on raw pointers and on a range of its outermost loop, so that the caller may split it over threads;
// its result does not depend on the split. Every table is total: it serves all that the ops' schemas allow.
// The same source (kernels/*.inl) is compiled once per instruction set unless a kernel has an own, faster variant.
#pragma once
#include <cstddef>
#include <cstdint>

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
