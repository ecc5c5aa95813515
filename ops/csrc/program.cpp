// Recording programs and running them: the C functions that ops/program.py calls.
#include "program.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <chrono>
#include <exception>

#include "team.h"

namespace dasllama {
namespace {

thread_local Program* current = nullptr;
thread_local std::string error;

}  // namespace

Program* recording() { return current; }

namespace {

void hold(const torch::stable::Tensor& tensor) {
  if (current) current->held.push_back({tensor, tensor.const_data_ptr()});
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(dasllama, CPU, m) { m.impl("hold", TORCH_BOX(&hold)); }

}  // namespace dasllama

#define DASLLAMA_EXPORT extern "C" __attribute__((visibility("default")))

using dasllama::Program;

// Every op that the calling thread performs from now on goes into a new program. Null if it records one already.
DASLLAMA_EXPORT void* dasllama_record() { return dasllama::current ? nullptr : dasllama::current = new Program; }

// Ends recording. Returns why the program must not be run, or "".
DASLLAMA_EXPORT const char* dasllama_record_end(void* program) {
  if (dasllama::current != program) return "recording was ended by another thread";
  dasllama::current = nullptr;
  return static_cast<Program*>(program)->refused.c_str();
}

DASLLAMA_EXPORT int64_t dasllama_program_size(const void* program) {
  return static_cast<int64_t>(static_cast<const Program*>(program)->entries.size());
}

DASLLAMA_EXPORT const char* dasllama_program_op(const void* program, int64_t i) {
  return static_cast<const Program*>(program)->entries[static_cast<size_t>(i)].op;
}

// Whether the tensors that are held lie where they lay when they were recorded.
DASLLAMA_EXPORT int dasllama_program_in_place(const void* program) {
  for (const Program::Held& held : static_cast<const Program*>(program)->held)
    if (held.tensor.const_data_ptr() != held.data || !held.tensor.is_contiguous()) return 0;
  return 1;
}

DASLLAMA_EXPORT void dasllama_program_free(void* program) {
  if (dasllama::current == program) dasllama::current = nullptr;
  delete static_cast<Program*>(program);
}

// Runs a program, and behind it another one if there is, on torch's threads, all of them for the whole of it. seconds:
// null, or takes the time of each op of both. Returns null, or what went wrong; the text lives until the thread's next
// call.
DASLLAMA_EXPORT const char* dasllama_program_run(const void* program, const void* then, double* seconds) {
  try {
    const Program* programs[] = {static_cast<const Program*>(program), static_cast<const Program*>(then)};
    // A step that has nothing to share does not wait for threads that may have no core.
    const bool shared = programs[0]->shared || (then && programs[1]->shared);
    const int threads = shared ? torch::stable::get_num_threads() : 1;
    dasllama::Team team(threads);
    std::exception_ptr failed;
    const auto entries = [&] {
      for (const Program* each : programs) {
        if (!each) continue;
        for (const Program::Entry& entry : each->entries) {
          if (!seconds) {
            entry.body();
            continue;
          }
          const auto start = std::chrono::steady_clock::now();
          entry.body();
          *seconds++ = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        }
      }
    };
    // One piece for each thread. Where torch gives them all to one, as within another parallel loop, it is the leader's.
    torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t) {
      if (begin) return team.help();
      try {
        team.lead(entries);
      } catch (...) {
        failed = std::current_exception();
      }
    });
    if (failed) std::rethrow_exception(failed);
    return nullptr;
  } catch (const std::exception& e) {
    dasllama::error = e.what();
    return dasllama::error.c_str();
  }
}
