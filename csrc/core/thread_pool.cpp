#include "core/thread_pool.h"

#include <unistd.h>

#include <atomic>
#include <exception>

#include "core/error.h"

namespace cpr_ext {

struct ThreadPool::Loop {
  Loop(const std::function<void(int64_t)>& body, int64_t num_tasks)
      : body(body), num_tasks(num_tasks) {}

  const std::function<void(int64_t)>& body;
  const int64_t num_tasks;
  std::atomic<int64_t> next{0};
  std::mutex error_mutex;
  std::exception_ptr error;
};

ThreadPool::ThreadPool(int num_threads) : creator_(::getpid()) {
  if (num_threads < 1 || num_threads > 1024) {
    throw UsageError("num_threads is " + std::to_string(num_threads) + "; allowed: 1 to 1024");
  }
  try {
    for (int i = 1; i < num_threads; ++i) workers_.emplace_back([this] { worker(); });
  } catch (...) {
    stop();  // else the threads already started would end the process
    throw;
  }
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (auto& thread : workers_) thread.join();
}

void ThreadPool::take_tasks(Loop& loop) {
  for (;;) {
    const int64_t task = loop.next.fetch_add(1, std::memory_order_relaxed);
    if (task >= loop.num_tasks) return;
    try {
      loop.body(task);
    } catch (...) {
      std::lock_guard<std::mutex> lock(loop.error_mutex);
      if (!loop.error) loop.error = std::current_exception();
      loop.next.store(loop.num_tasks, std::memory_order_relaxed);
    }
  }
}

void ThreadPool::worker() {
  uint64_t seen = 0;
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    wake_.wait(lock, [&] { return stopping_ || generation_ != seen; });
    if (stopping_) return;
    seen = generation_;
    Loop* loop = loop_;
    if (loop == nullptr) continue;  // woke after the loop had ended
    ++busy_workers_;
    lock.unlock();
    take_tasks(*loop);
    lock.lock();
    if (--busy_workers_ == 0) idle_.notify_all();
  }
}

void ThreadPool::parallel_for(int64_t num_tasks, const std::function<void(int64_t)>& body) {
  if (num_tasks <= 0) return;
  if (::getpid() != creator_) {  // a worker may have held mutex_ when the process was forked
    for (int64_t task = 0; task < num_tasks; ++task) body(task);
    return;
  }
  std::lock_guard<std::mutex> one_loop(one_loop_);
  Loop loop(body, num_tasks);
  const bool shared = !workers_.empty() && num_tasks > 1;
  if (shared) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      loop_ = &loop;
      ++generation_;
    }
    wake_.notify_all();
  }
  take_tasks(loop);
  if (shared) {
    // Invariant: once loop_ is null no further worker can enter, so `loop` may leave the stack.
    std::unique_lock<std::mutex> lock(mutex_);
    loop_ = nullptr;
    idle_.wait(lock, [&] { return busy_workers_ == 0; });
  }
  if (loop.error) std::rethrow_exception(loop.error);
}

}  // namespace cpr_ext
