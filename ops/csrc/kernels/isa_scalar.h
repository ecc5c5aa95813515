// Plain C++ for any processor: the kernels that serve all that the schemas allow.
#define DASLLAMA_ISA_SCALAR
#include "../matmul_int.h"
