// The threads that run a recorded program together. Nothing here knows torch.
#pragma once
#include <atomic>
#include <cstdint>

namespace dasllama {

// One thread leads and says what loops there are; others help with their pieces, from when they come until the leader is
// done. Pieces are drawn, by the leader too, so no loop waits for a helper that has no core, but for one that lost it
// within a piece.
class Team {
 public:
  // threads: how many there may be, the leader included.
  explicit Team(int threads) : threads_(threads) {}
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  // The team that the calling thread leads, or null.
  static Team* current();

  int threads() const { return threads_; }

  // The leader's part: calls body(), within which this is the current team.
  template <class F>
  void lead(const F& body) {
    const Leading leading(*this);
    body();
  }

  // The others' part: returns when the leader is done.
  void help();

  // Calls f(begin, end, context) on pieces of [0, n) of at least `grain` items; f must not throw. For the leader.
  void run(int64_t n, int64_t grain, void (*f)(int64_t begin, int64_t end, const void* context), const void* context);

 private:
  struct Leading {
    explicit Leading(Team& team);
    ~Leading();
    Team &team, *before;
  };

  struct Loop {
    void (*f)(int64_t, int64_t, const void*);
    const void* context;
    int64_t n, pieces;
  };

  bool draw() noexcept;

  const int threads_;
  uint64_t round_ = 0;
  Loop loop_ = {};  // of the round; stays as it is until all its pieces are done
  // Round and number of pieces that are left to draw, in one word: who draws one knows that its round is still open.
  alignas(64) std::atomic<uint64_t> left_{0};
  alignas(64) std::atomic<int64_t> undone_{0};  // pieces of the round that are not done
  alignas(64) std::atomic<bool> over_{false};
};

}  // namespace dasllama
