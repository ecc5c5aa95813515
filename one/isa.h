#include "csrc/kernels/isa_avx512vnni.h"
