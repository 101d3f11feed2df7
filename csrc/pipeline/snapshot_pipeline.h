// Joins staging and storage: the training thread fills one slot while another is checked and a
// third is written, each on a thread of its own, in the order in which they were filled. When no
// slot is free the capture waits or stops; nothing is ever allocated for it.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "core/thread_pool.h"
#include "pipeline/segment_job.h"
#include "pipeline/work_log.h"
#include "staging/device_stager.h"
#include "staging/slot_pool.h"

namespace cpr_ext {

class SnapshotPipeline {
 public:
  // `stagers`: of the devices that tables lie on; the slots are pinned for them.
  SnapshotPipeline(int num_slots, int64_t slot_bytes, std::shared_ptr<ThreadPool> threads,
                   std::vector<std::shared_ptr<DeviceStager>> stagers = {});
  // Writes what is queued, then ends. REQUIRES: every job but those queued has been destroyed.
  ~SnapshotPipeline();

  // Throws UsageError if the plan does not fit the slots.
  std::shared_ptr<SegmentJob> start(CapturePlan plan);

  SlotPool& slots() { return slots_; }
  std::shared_ptr<ThreadPool> threads() { return threads_; }
  WorkLog& log() { return log_; }  // a slot's "check" and "write"

 private:
  friend class SegmentJob;
  struct Work {
    std::shared_ptr<SegmentJob> job;
    SegmentJob::FilledSlot filled;
  };
  // Never longer than the number of slots.
  class Queue {
   public:
    void push(Work&& work);  // if it throws, `work` is as it was
    bool pop(Work* work);    // waits; false if it is closed and empty
    void close();            // what is in it may still be popped

   private:
    std::mutex mutex_;
    std::condition_variable wake_;
    std::deque<Work> queue_;  // guarded by mutex_
    bool is_closed_ = false;  // guarded by mutex_
  };
  void enqueue(Work work) { to_check_.push(std::move(work)); }
  void checker_loop();
  void writer_loop();

  const std::vector<std::shared_ptr<DeviceStager>> stagers_;
  SlotPool slots_;
  const PinnedSlots pinned_;
  const std::shared_ptr<ThreadPool> threads_;
  Queue to_check_;
  Queue to_write_;
  WorkLog log_;
  std::thread checker_thread_;
  std::thread writer_thread_;
};

}  // namespace cpr_ext
