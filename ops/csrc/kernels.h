// The table of CPU kernels: one function pointer per kernel, one table per instruction set. Nothing here knows torch.
//
// A kernel works on raw pointers and on a range of its outermost loop, so that the caller may split it over threads;
// its result does not depend on the split. Every table is total: it serves all that the ops' schemas allow.
// The same source (kernels/*.inl) is compiled once per instruction set unless a kernel has an own, faster variant.
#pragma once
#include <cstddef>
#include <cstdint>

namespace dasllama {

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
};

// The table in force: the best one that this processor runs, or the one that dasllama_set_isa asked for.
const Kernels& kernels();

// Counts one call of `op` served by `variant` (both string literals) for dasllama_report.
void count_call(const char* op, const char* variant);

}  // namespace dasllama
