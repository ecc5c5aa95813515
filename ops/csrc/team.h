// The threads that run a recorded program together. Nothing here knows torch.
#pragma once
#include <cstdint>

namespace dasllama {

// Threads that share the loops of one program: the caller and its workers. Between two loops of a step the workers spin,
// since there is not a microsecond between them; some time after the last one they sleep.
class Team {
 public:
  // Makes the calling thread the leader of the process's team, which gets so many threads, until the end of scope.
  // Only one thread leads at a time; others wait here.
  explicit Team(int threads);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  // The team that the calling thread leads, or null.
  static Team* current();

  int threads() const { return threads_; }

  // Calls f(begin, end, context) on pieces of [0, n) of at least `grain` items, on all threads; f must not throw.
  void run(int64_t n, int64_t grain, void (*f)(int64_t begin, int64_t end, const void* context), const void* context);

 private:
  const int threads_;
};

}  // namespace dasllama
