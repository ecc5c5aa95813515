// Recording programs and running them: the C functions that ops/program.py calls.
#include "program.h"

#include <exception>
#include <memory>

#include "team.h"

namespace dasllama {
namespace {

thread_local Program* current = nullptr;
thread_local std::string error;

}  // namespace

Program* recording() { return current; }

}  // namespace dasllama

#define DASLLAMA_EXPORT extern "C" __attribute__((visibility("default")))

using dasllama::Program;

// Every op that the calling thread performs from now on goes into a new program.
DASLLAMA_EXPORT void* dasllama_record() { return dasllama::current = new Program; }

// Ends recording. Returns why the program must not be run, or "".
DASLLAMA_EXPORT const char* dasllama_record_end() {
  Program* program = dasllama::current;
  dasllama::current = nullptr;
  return program->refused.c_str();
}

DASLLAMA_EXPORT int64_t dasllama_program_size(const void* program) {
  return static_cast<int64_t>(static_cast<const Program*>(program)->entries.size());
}

DASLLAMA_EXPORT void dasllama_program_free(void* program) { delete static_cast<Program*>(program); }

// Returns null, or what went wrong; the text lives until the thread's next call.
DASLLAMA_EXPORT const char* dasllama_program_run(const void* program, int threads) {
  try {
    const dasllama::Team team(threads);
    for (const Program::Entry& entry : static_cast<const Program*>(program)->entries) entry.body();
    return nullptr;
  } catch (const std::exception& e) {
    dasllama::error = e.what();
    return dasllama::error.c_str();
  }
}
