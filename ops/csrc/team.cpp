#include "team.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#if !defined(_WIN32)
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace dasllama {
namespace {

constexpr int kSpins = 1 << 12;         // pauses before a worker sleeps: longer than a pause between two steps
constexpr int kLeaderSpins = 1 << 10;   // ... and before a waiting leader offers its core to a worker without one
constexpr int64_t kPiecesPerThread = 4; // so that a thread that lost its core for a while does not hold up the others

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

struct Loop {
  void (*f)(int64_t, int64_t, const void*);
  const void* context;
  int64_t n, pieces;
};

// Workers live until the process ends, or until a team of another size is wanted.
class Workers {
 public:
  explicit Workers(int count) {
    for (int i = 0; i < count; i++) threads_.emplace_back([this] { work(); });
  }
  ~Workers() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_.store(true);
      round_.fetch_add(1);
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  int count() const { return static_cast<int>(threads_.size()); }

  void run(const Loop& loop) {
    loop_ = loop;
    next_.store(0, std::memory_order_relaxed);
    busy_.store(count(), std::memory_order_relaxed);
    // Sequentially consistent with a sleeper's count and its last look at round_: one of the two sees the other.
    round_.fetch_add(1);
    if (sleepers_.load() > 0) {
      std::lock_guard<std::mutex> lock(mutex_);
      wake_.notify_all();
    }
    draw();
    for (int spins = 0; busy_.load(std::memory_order_acquire) > 0; spins++)
      spins < kLeaderSpins ? pause() : std::this_thread::yield();
  }

 private:
  void draw() {
    const Loop& l = loop_;
    for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < l.pieces;)
      l.f(l.n * i / l.pieces, l.n * (i + 1) / l.pieces, l.context);
  }

  void work() {
    for (uint64_t seen = 0;;) {
      int spins = 0;
      while (round_.load(std::memory_order_acquire) == seen) {
        if (++spins < kSpins) {
          pause();
          continue;
        }
        std::unique_lock<std::mutex> lock(mutex_);
        sleepers_.fetch_add(1);
        wake_.wait(lock, [&] { return round_.load() != seen; });
        sleepers_.fetch_sub(1);
      }
      seen++;  // the leader starts no round before all workers have left the one before
      if (stop_.load()) return;
      draw();
      busy_.fetch_sub(1, std::memory_order_release);
    }
  }

  Loop loop_ = {};
  alignas(64) std::atomic<uint64_t> round_{0};
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int> busy_{0};
  alignas(64) std::atomic<int> sleepers_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> threads_;
};

// Never destroyed: joining threads while a process ends can hang, and after a fork they are not there.
struct Shared {
  std::mutex leader;
  Workers* workers = nullptr;
  int process = 0;  // that the workers are of
};
Shared& shared() {
  static Shared* made = new Shared;
  return *made;
}

int process_id() {
#if defined(_WIN32)
  return 0;  // there is no fork
#else
  return static_cast<int>(getpid());
#endif
}

thread_local Team* current_team = nullptr;

}  // namespace

Team::Team(int threads) : threads_(std::max(threads, 1)) {
  shared().leader.lock();
  Workers*& workers = shared().workers;
  if (shared().process != process_id()) workers = nullptr;
  if (threads_ > 1 && (!workers || workers->count() != threads_ - 1)) {
    delete workers;
    workers = new Workers(threads_ - 1);
    shared().process = process_id();
  }
  current_team = this;
}

Team::~Team() {
  current_team = nullptr;
  shared().leader.unlock();
}

Team* Team::current() { return current_team; }

void Team::run(int64_t n, int64_t grain, void (*f)(int64_t, int64_t, const void*), const void* context) {
  const int64_t most = (n + grain - 1) / grain;
  if (threads_ == 1 || most < 2) {
    if (n > 0) f(0, n, context);
    return;
  }
  shared().workers->run({f, context, n, std::min<int64_t>(most, kPiecesPerThread * threads_)});
}

}  // namespace dasllama
