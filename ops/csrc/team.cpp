#include "team.h"

#include <algorithm>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace dasllama {
namespace {

constexpr int kRoundShift = 16;           // bits for the number of pieces
constexpr int64_t kPiecesPerThread = 4;   // so that a thread that lost its core for a while does not hold up the others
constexpr int kSpins = 1 << 10;           // before a waiting leader, and later a helper, offers its core to others

thread_local Team* current_team = nullptr;

// Lets the other thread of the core work meanwhile.
inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

Team* Team::current() { return current_team; }

Team::Leading::Leading(Team& team) : team(team), before(current_team) { current_team = &team; }

Team::Leading::~Leading() {
  current_team = before;
  team.over_.store(true, std::memory_order_release);
}

void Team::help() {
  for (int spins = 0; !over_.load(std::memory_order_acquire);) {
    if (draw())
      spins = 0;
    else
      spins++ < 16 * kSpins ? pause() : std::this_thread::yield();
  }
}

// Does one piece of the round, if there is any.
bool Team::draw() noexcept {
  uint64_t left = left_.load(std::memory_order_acquire);
  const uint64_t piece = left & ((uint64_t{1} << kRoundShift) - 1);
  if (!piece || !left_.compare_exchange_strong(left, left - 1, std::memory_order_acquire)) return false;
  const Loop& l = loop_;
  const int64_t i = static_cast<int64_t>(piece) - 1;
  l.f(l.n * i / l.pieces, l.n * (i + 1) / l.pieces, l.context);
  undone_.fetch_sub(1, std::memory_order_release);
  return true;
}

void Team::run(int64_t n, int64_t grain, void (*f)(int64_t, int64_t, const void*), const void* context) {
  if (n <= 0) return;
  const int64_t pieces = std::min<int64_t>({(n + grain - 1) / grain, kPiecesPerThread * threads_, 1 << 12});
  const bool within = undone_.load(std::memory_order_relaxed) > 0;  // a loop of the leader's own piece
  if (threads_ == 1 || pieces < 2 || within) return f(0, n, context);
  loop_ = {f, context, n, pieces};
  undone_.store(pieces, std::memory_order_relaxed);
  left_.store(++round_ << kRoundShift | static_cast<uint64_t>(pieces), std::memory_order_release);
  for (int spins = 0; undone_.load(std::memory_order_acquire) > 0;) {
    if (draw()) continue;
    spins++ < kSpins ? pause() : std::this_thread::yield();
  }
}

}  // namespace dasllama
