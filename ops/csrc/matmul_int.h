// The integer matmul of one instruction set: a table of its own, because its files take most of the time that all kernels
// take to compile, and include nothing that changes with the others.
// The standard headers come here, before a target pragma: a template that std shares between files must not be compiled
// for an instruction set that only some processors have. For the same reason kernels use no containers.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace dasllama {

// How the integer matmul of one instruction set wants a type's activation: sums are over `group` elements, and weights
// are multiplied as weight + bias, which `init` takes back; the kernels for few rows know for which types they multiply
// weights without bias (AVX2, signed weights), and leave it out. A task's first weight row is a multiple of `strip`.
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

// y[m, n] = x[m] . w[n] (+ bias[n]) in the order of ops/quant_linear.py; w is [N, row_bytes] of a packed type, y has rows
// of N, of which row m of x makes rows[m], or m where rows is null.
struct IntMatmul {
  IntActivation x;
  const uint8_t* w;
  int64_t row_bytes;
  int qtype;
  const float* bias;  // [N] or null
  float* y;
  int64_t N, K;
  const int64_t* rows;

  float* y_row(int64_t m) const { return y + (rows ? rows[m] : m) * N; }
};

struct IntKernels {
  IntTraits (*traits)(int qtype);
  // Weight rows [n_begin, n_end) times rows [m_begin, m_end) of x.
  void (*matmul)(const IntMatmul& p, int64_t n_begin, int64_t n_end, int64_t m_begin, int64_t m_end);
};

extern const IntKernels int_kernels_avx2;  // only on x86-64; AVX-512 has it do what it does better

// At least `bytes` bytes, aligned to 64, that belong to the calling thread until it asks again.
void* thread_scratch(size_t bytes);

}  // namespace dasllama
