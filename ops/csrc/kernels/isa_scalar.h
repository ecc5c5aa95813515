// Plain C++ for any processor: the kernels that serve all that the schemas allow.
#include "../matmul_int.h"
