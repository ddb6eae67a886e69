#include "pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace penstock {
namespace {

// torch.set_flush_denormal and some libraries make a thread round denormals to zero, and threads inherit that. The
// results here must not depend on it.
class DefaultFloatMode {
 public:
#if defined(__SSE2__)
  DefaultFloatMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~DefaultFloatMode() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  DefaultFloatMode() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" ::"r"(uint64_t{0}));
  }
  ~DefaultFloatMode() { asm volatile("msr fpcr, %0" ::"r"(saved_)); }

 private:
  uint64_t saved_;
#endif
};

struct Job {
  size_t n, grain;
  Task task;
  const void* context;
  std::atomic<size_t> next{0};

  void work() {
    DefaultFloatMode mode;
    for (;;) {
      const size_t begin = next.fetch_add(grain, std::memory_order_relaxed);
      if (begin >= n) return;
      task(context, begin, std::min(begin + grain, n));
    }
  }
};

class Pool {
 public:
  void run(Job& job, int threads) {
    std::lock_guard<std::mutex> one_caller(callers_);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (; started_ < threads - 1; ++started_) std::thread(&Pool::loop, this, started_, generation_).detach();
      job_ = &job;
      helpers_ = threads - 1;
      pending_ = helpers_;
      ++generation_;
    }
    wake_.notify_all();
    job.work();
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return pending_ == 0; });
    job_ = nullptr;
  }

 private:
  void loop(int index, unsigned long seen) {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return generation_ != seen; });
      seen = generation_;
      if (index >= helpers_) continue;  // this job asked for fewer threads
      Job* job = job_;
      lock.unlock();
      job->work();
      lock.lock();
      if (--pending_ == 0) done_.notify_one();
    }
  }

  std::mutex callers_, mutex_;
  std::condition_variable wake_, done_;
  Job* job_ = nullptr;
  unsigned long generation_ = 0;
  int helpers_ = 0, pending_ = 0, started_ = 0;
};

// Never destroyed: its threads may still sleep in it while the process exits. A forked child has none of those threads
// and possibly a lock that is held forever, so it starts with a new pool.
std::atomic<Pool*> the_pool{nullptr};

Pool& pool() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { the_pool.store(new Pool); });
  (void)registered;
  if (Pool* existing = the_pool.load()) return *existing;
  Pool* fresh = new Pool;
  Pool* expected = nullptr;
  if (the_pool.compare_exchange_strong(expected, fresh)) return *fresh;
  delete fresh;
  return *expected;
}

}  // namespace

void parallel(size_t n, size_t grain, int threads, Task task, const void* context) {
  const size_t ranges = (n + grain - 1) / grain;
  const int useful = static_cast<int>(std::min<size_t>(std::max(threads, 1), std::max<size_t>(ranges, 1)));
  Job job{n, grain, task, context};
  if (useful == 1) {
    job.work();
  } else {
    pool().run(job, useful);
  }
}

}  // namespace penstock
