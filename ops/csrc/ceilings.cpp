// Loops that run as fast as a core can, in the instruction set in force: the C functions that dasllama_torch/bench.py calls.
#include "kernels.h"

#define DASLLAMA_EXPORT extern "C" __attribute__((visibility("default")))

// Reads n bytes, a multiple of 512, from p, aligned to 64; what it returns means nothing.
DASLLAMA_EXPORT int64_t dasllama_read_ceiling(const uint8_t* p, int64_t n) { return dasllama::kernels().read_ceiling(p, n); }

// n steps of f32 multiply-adds, and of products of bytes added to 32-bit integers. They return how many were done.
DASLLAMA_EXPORT int64_t dasllama_fma_ceiling(int64_t n) { return dasllama::kernels().fma_ceiling(n); }
DASLLAMA_EXPORT int64_t dasllama_dot_ceiling(int64_t n) { return dasllama::kernels().dot_ceiling(n); }
