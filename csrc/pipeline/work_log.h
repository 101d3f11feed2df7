// A timeline of a pipeline's threads, for pictures; off until somebody starts it.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

namespace cpr_ext {

class WorkLog {
 public:
  // Times are nanoseconds of the steady clock.
  struct WorkSpan {
    const char* what;
    int64_t begin_ns;
    int64_t end_ns;
  };

  void start() {
    std::lock_guard<std::mutex> lock(mutex_);
    entries_.clear();
    is_on_ = true;
  }

  // What was done since start(), in the order in which it ended.
  std::vector<WorkSpan> stop() {
    std::lock_guard<std::mutex> lock(mutex_);
    is_on_ = false;
    return std::exchange(entries_, {});
  }

  // From its construction to its end; `what` outlives the log. Entries that cannot be allocated
  // are dropped.
  class Span {
   public:
    Span(WorkLog& log, const char* what)
        : log_(log),
          what_(what),
          begin_ns_(log.is_on_.load(std::memory_order_relaxed) ? now() : 0) {}
    ~Span() {
      if (begin_ns_ != 0) log_.add({what_, begin_ns_, now()});
    }
    Span(const Span&) = delete;
    Span& operator=(const Span&) = delete;

   private:
    static int64_t now() {
      const auto time = std::chrono::steady_clock::now().time_since_epoch();
      return std::chrono::duration_cast<std::chrono::nanoseconds>(time).count();
    }

    WorkLog& log_;
    const char* const what_;
    const int64_t begin_ns_;
  };

 private:
  void add(WorkSpan entry) noexcept {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!is_on_) return;
    try {
      entries_.push_back(entry);
    } catch (...) {
    }
  }

  std::atomic<bool> is_on_{false};
  std::mutex mutex_;
  std::vector<WorkSpan> entries_;  // guarded by mutex_
};

}  // namespace cpr_ext
