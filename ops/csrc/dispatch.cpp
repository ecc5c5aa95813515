// Picks the kernel table for this processor at run time, lets tests override it, and counts who served what.
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "kernels.h"

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace dasllama {

extern const Kernels kernels_scalar;
#if defined(__x86_64__)
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512vnni;
#elif defined(__aarch64__)
extern const Kernels kernels_neon;
#endif

namespace {

struct Candidate {
  const Kernels* table;
  bool runs;
};

// Slowest first. __builtin_cpu_supports also checks that the operating system saves the registers.
const Candidate* candidates(int* n) {
#if defined(__x86_64__)
  static const bool avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#elif defined(__aarch64__)
#if defined(__linux__)
  static const bool dotprod = getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#else
  static const bool dotprod = true;  // Apple's processors all have them
#endif
#endif
  static const Candidate all[] = {
      {&kernels_scalar, true},
#if defined(__x86_64__)
      {&kernels_avx2, avx2},
      {&kernels_avx512vnni, avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                                __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                                __builtin_cpu_supports("avx512vnni")},
#elif defined(__aarch64__)
      {&kernels_neon, dotprod},
#endif
  };
  *n = sizeof(all) / sizeof(all[0]);
  return all;
}

const Kernels* best() {
  int n;
  const Candidate* all = candidates(&n);
  const Kernels* found = all[0].table;
  for (int i = 0; i < n; i++)
    if (all[i].runs) found = all[i].table;
  return found;
}

std::atomic<const Kernels*> chosen{nullptr};

std::mutex calls_mutex;
std::map<std::pair<const char*, const char*>, int64_t> calls;

}  // namespace

const Kernels& kernels() {
  const Kernels* table = chosen.load(std::memory_order_relaxed);
  if (!table) chosen.store(table = best(), std::memory_order_relaxed);
  return *table;
}

thread_local const char* last_op = "";

void count_call(const char* op, const char* variant) {
  last_op = op;
  std::lock_guard<std::mutex> lock(calls_mutex);
  calls[{op, variant}]++;
}

const char* last_counted() { return last_op; }

}  // namespace dasllama

extern "C" {

// Names of the instruction sets that run here, separated by blanks, slowest first.
__attribute__((visibility("default"))) const char* dasllama_isas() {
  static const std::string names = [] {
    int n;
    const auto* all = dasllama::candidates(&n);
    std::string joined;
    for (int i = 0; i < n; i++)
      if (all[i].runs) joined += (joined.empty() ? "" : " ") + std::string(all[i].table->name);
    return joined;
  }();
  return names.c_str();
}

// "" picks the best table; returns 1 and changes nothing if this processor does not run the one that is named.
__attribute__((visibility("default"))) int dasllama_set_isa(const char* name) {
  if (!*name) {
    dasllama::chosen.store(dasllama::best());
    return 0;
  }
  int n;
  const auto* all = dasllama::candidates(&n);
  for (int i = 0; i < n; i++)
    if (all[i].runs && !std::strcmp(all[i].table->name, name)) {
      dasllama::chosen.store(all[i].table);
      return 0;
    }
  return 1;
}

// The table in force, for tests that call kernels without torch.
__attribute__((visibility("default"))) const dasllama::Kernels* dasllama_kernels() { return &dasllama::kernels(); }

// Writes "op \t kernel \t count" lines into buffer (size bytes, zero-terminated); returns the length of the whole text.
__attribute__((visibility("default"))) size_t dasllama_report(char* buffer, size_t size) {
  std::map<std::string, int64_t> lines;  // equal literals may have more than one address
  {
    std::lock_guard<std::mutex> lock(dasllama::calls_mutex);
    for (const auto& [key, count] : dasllama::calls)
      lines[std::string(key.first) + "\tcpu/" + key.second] += count;
  }
  std::string text;
  for (const auto& [line, count] : lines) text += line + "\t" + std::to_string(count) + "\n";
  if (buffer && size) {
    const size_t n = text.size() < size - 1 ? text.size() : size - 1;
    std::memcpy(buffer, text.data(), n);
    buffer[n] = 0;
  }
  return text.size();
}

__attribute__((visibility("default"))) void dasllama_reset_report() {
  std::lock_guard<std::mutex> lock(dasllama::calls_mutex);
  dasllama::calls.clear();
}
}
