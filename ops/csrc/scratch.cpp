// Memory of a thread for the inside of one kernel call.
#include <cstdlib>
#include <memory>
#include <new>

#include "matmul_int.h"

namespace dasllama {

void* thread_scratch(size_t bytes) {
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  thread_local std::unique_ptr<void, Free> memory;
  thread_local size_t size = 0;
  if (bytes > size) {
    size = 0;
    memory.reset();
    const size_t rounded = (bytes + 4095) / 4096 * 4096;
    memory.reset(std::aligned_alloc(64, rounded));
    if (!memory) throw std::bad_alloc();
    size = rounded;
  }
  return memory.get();
}

}  // namespace dasllama
