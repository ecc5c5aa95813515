// A forward recorded as a list of what its ops did, to be run again without a dispatcher, checks of shapes or memory.
//
// An op's binding checks and makes its output, then hands the rest to `perform`: a function of captured pointers. Whatever
// of an op depends on values (ids, positions, page tables) happens in there, so that it happens again.
#pragma once
#include <functional>
#include <initializer_list>
#include <string>
#include <vector>

#include <torch/csrc/stable/tensor.h>

#include "kernels.h"

namespace dasllama {

struct Program {
  struct Entry {
    const char* op;
    std::function<void()> body;
    std::vector<torch::stable::Tensor> kept;  // whose memory the body reads and writes
  };
  // A tensor that others may give other memory to (`tensor.data = ...`), and the memory that the bodies know.
  struct Held {
    torch::stable::Tensor tensor;
    const void* data;
  };
  std::vector<Entry> entries;
  std::vector<Held> held;
  std::string refused;  // why the record is not the whole of what happened, or empty
  bool shared = false;  // some op has work for more than one thread
};

// What the calling thread is recording into, or null.
Program* recording();

// Something happens outside of `perform` that would have to happen again: the record is void.
inline void not_recorded(const char* what) {
  if (Program* program = recording()) program->refused = what;
}

// Runs body now, and again with the program if one is being recorded. kept: tensors whose pointers body holds.
template <class F>
void perform(std::initializer_list<torch::stable::Tensor> kept, F body) {
  body();
  if (Program* program = recording()) program->entries.push_back({last_counted(), std::move(body), kept});
}

}  // namespace dasllama
