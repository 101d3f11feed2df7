// A small persistent pool for data-parallel loops. The calling thread always takes part, so a pool
// of one thread starts none and runs every loop in place.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace cpr_ext {

class ThreadPool {
 public:
  // REQUIRES: 1 <= num_threads <= 1024, the caller's thread counted in. Throws std::system_error if
  // the system refuses a thread.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();

  int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Runs body(0) ... body(num_tasks - 1), in any order and on any thread, and returns when all have
  // ended. The first exception is rethrown here; tasks not yet started are then skipped.
  // One loop at a time: a second caller waits. Must not be called from inside a body. In a forked
  // child, which has none of the threads, the loop runs in place.
  void parallel_for(int64_t num_tasks, const std::function<void(int64_t)>& body);

 private:
  struct Loop;
  void worker();
  void stop();
  static void take_tasks(Loop& loop);

  const pid_t creator_;
  std::mutex one_loop_;  // held by the caller of parallel_for
  std::mutex mutex_;     // guards all below
  std::condition_variable wake_;
  std::condition_variable idle_;
  Loop* loop_ = nullptr;
  uint64_t generation_ = 0;
  int busy_workers_ = 0;
  bool stopping_ = false;
  std::vector<std::thread> workers_;
};

}  // namespace cpr_ext
