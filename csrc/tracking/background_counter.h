// Counts lookups on a thread of its own, so that training does not wait for the memory of the
// trackers.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/thread_pool.h"
#include "tracking/lookup.h"
#include "tracking/row_tracker.h"

namespace cpr_ext {

// Small batches are gathered, so that the thread is not woken for each. All trackers that were
// given a batch wait for it in their public calls, so that no caller sees a tracker without it.
class BackgroundCounter : public CountBacklog {
 public:
  // `pool` shares large batches; nullptr for no other threads. Throws std::system_error if the
  // system refuses a thread.
  explicit BackgroundCounter(std::shared_ptr<ThreadPool> pool);
  ~BackgroundCounter() override;

  // As count_lookups(), but returns once the indices are copied. Everything is checked before
  // anything is observed. REQUIRES: all lie on the host; the trackers outlive this object; as with
  // a tracker, one thread calls at a time.
  void count(const std::vector<RowTracker*>& trackers, const std::vector<Lookup>& lookups);

  // Returns once all is counted, also by several threads at once: what was gathered is counted by
  // the caller. Rethrows what counting threw, each time: rows are missing from then on. In a forked
  // child, which has no such thread, it returns at once.
  void wait() override;

  // The message of what counting threw, if it has. Does not wait.
  std::optional<std::string> error();

 private:
  using Lock = std::unique_lock<std::mutex>;

  // Lookups of several calls, in their order.
  struct GatheredRows {
    struct GatheredLookup {
      RowTracker* tracker;
      int64_t begin, end;  // of its lookup, in `indices`
    };

    std::vector<int64_t> indices;
    std::vector<GatheredLookup> parts;

    // On an exception nothing was added.
    void add(const std::vector<RowTracker*>& trackers, const std::vector<Lookup>& lookups);
    void count(ThreadPool* pool);  // once
  };

  void work();
  void stop();
  void know(const std::vector<RowTracker*>& trackers);
  void wait_until_idle(Lock& lock);
  void count_gathered();

  const pid_t creator_;
  const std::shared_ptr<ThreadPool> pool_;
  std::mutex mutex_;  // guards all below but `counted_`, which belongs to the thread while busy
  std::condition_variable wake_;
  std::condition_variable idle_;
  bool is_busy_ = false;
  bool is_stopping_ = false;
  std::exception_ptr error_;
  GatheredRows gathered_;
  GatheredRows counted_;
  std::vector<RowTracker*> known_;   // those that wait for this object; ascending
  std::vector<RowTracker*> newest_;  // of the last call; all are known
  std::thread thread_;
};

}  // namespace cpr_ext
