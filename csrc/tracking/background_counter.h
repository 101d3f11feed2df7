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
#include "tracking/count_backlog.h"
#include "tracking/lookup.h"
#include "tracking/row_tracker.h"

namespace cpr_ext {

// One batch is counted at a time; the next one waits for it. All trackers that were given a batch
// wait for it in their public calls, so that no caller sees a tracker without it.
class BackgroundCounter : public CountBacklog {
 public:
  // `pool` shares large batches; nullptr for no other threads. Throws std::system_error if the
  // system refuses a thread.
  explicit BackgroundCounter(std::shared_ptr<ThreadPool> pool);
  ~BackgroundCounter() override;
  BackgroundCounter(const BackgroundCounter&) = delete;
  BackgroundCounter& operator=(const BackgroundCounter&) = delete;

  // As count_lookups(), but returns once the indices are copied. Everything is checked before
  // anything is observed. REQUIRES: all lie on the host; the trackers outlive this object; as with
  // a tracker, one thread calls at a time.
  void count(const std::vector<RowTracker*>& trackers, const std::vector<Lookup>& lookups);

  // Returns once all is counted, also by several threads at once. Rethrows what counting threw,
  // each time: rows are missing from then on. In a forked child, which has no such thread, it
  // returns at once.
  void wait() override;

  // The message of what counting threw, if it has. Does not wait.
  std::optional<std::string> error();

 private:
  void work();
  void stop();

  const pid_t creator_;
  const std::shared_ptr<ThreadPool> pool_;
  std::mutex mutex_;  // guards all below but the batch, which belongs to the thread while busy
  std::condition_variable wake_;
  std::condition_variable idle_;
  bool is_busy_ = false;
  bool is_stopping_ = false;
  std::exception_ptr error_;
  std::vector<int64_t> indices_;       // of the batch, table by table
  std::vector<RowTracker*> trackers_;  // of the batch
  std::vector<Lookup> lookups_;        // parts of indices_
  std::vector<RowTracker*> known_;     // those that wait for this object; ascending
  std::thread thread_;
};

}  // namespace cpr_ext
