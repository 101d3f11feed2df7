// Joins staging and storage: the training thread fills one slot while another is checked and a
// third is written, each on a thread of its own, in the order in which they were filled. When no
// slot is free the capture waits or stops; nothing is ever allocated for it.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/thread_pool.h"
#include "pipeline/kept_rows.h"
#include "pipeline/segment_plan.h"
#include "pipeline/work_log.h"
#include "staging/device_stager.h"
#include "staging/slot_pool.h"

namespace cpr_ext {

class SnapshotPipeline;

// In this order; kFailed ends it from any of them but kCommitted.
enum class JobState { kCapturing, kCaptured, kWritten, kCommitted, kFailed };

// What to capture: the rows of each table, and where they go.
struct CapturePlan {
  std::string path;
  int64_t header_bytes = 0;
  int64_t file_bytes = 0;
  bool direct_io = true;
  bool refuse_nan = true;
  // Chunks are no larger than this (0: than a slot) where the alignment of the file allows it.
  int64_t max_chunk_bytes = 0;
  bool copy_on_write = false;  // keep() may be called
  std::vector<SegmentTable> tables;
  std::vector<std::vector<int64_t>> row_ids;  // per table (num_rows,), ascending; empty for a range
};

// One segment on its way to disk. Everything may be called from any thread; capture() only while no
// one writes the tables.
class SegmentJob : public std::enable_shared_from_this<SegmentJob> {
 public:
  SegmentJob(SnapshotPipeline& pipeline, CapturePlan plan);

  // Copies whole chunks into slots until about max_bytes were captured in this call (at least one
  // chunk; no limit if max_bytes <= 0), no slot is free (unless `wait_for_slot`), the job has
  // failed, or nothing is left; also when `stop` (may be null) becomes true, but not before one
  // chunk was captured. What was captured is on its way to the writer when it returns: no slot
  // stays behind, so jobs that share a pipeline cannot starve each other. Returns the captured
  // chunks, checksums not yet known.
  std::vector<Chunk> capture(int64_t step, int64_t max_bytes, bool wait_for_slot,
                             const std::atomic<bool>* stop = nullptr);

  // Rows of a table that are about to change: those not captured yet are copied aside, and are
  // captured as they are now. Returns how many row ids were done; less than `count` if the memory
  // for it is full: capture() frees some. Throws UsageError unless the plan said copy_on_write.
  template <class Index>
  int64_t keep(int table, const Index* row_ids, int64_t count);

  JobState state() const;

  // Waits until `state` or a later one is reached, or the job has failed and nothing of it is left:
  // its slots are free and its file is removed. False if `timeout` passed first.
  bool settle(JobState state, std::chrono::duration<double> timeout) const;

  // As settle(), but rethrows the first error of a failed job, every time; at the time-out too.
  bool wait(JobState state, std::chrono::duration<double> timeout) const;

  // The captured chunks with their checksums. Throws UsageError before kWritten.
  std::vector<Chunk> chunks() const;

  // Writes the header and syncs, once. Throws UsageError before kWritten. An error fails the job
  // and is rethrown.
  void finish(const std::string& header);

  // The manifest names the segment. Throws UsageError unless it is finished.
  void mark_committed();

  // Gives the job up (kFailed) unless it is committed; the first error is kept. The file is
  // removed, unless finish() has returned: then it is the store's, which knows whether a manifest
  // names it.
  void fail(std::exception_ptr error);
  void cancel(const std::string& reason);

 private:
  friend class SnapshotPipeline;
  struct FilledSlot {
    SlotLease slot;
    std::vector<std::unique_ptr<Arrival>> arrivals;  // from devices; awaited before `slot` is free
    std::vector<size_t> indices;                     // of its chunks in chunks_
    std::vector<Chunk> chunks;                       // copies, with checksums once it is checked
    std::exception_ptr error;                        // of the check
  };
  void capture_chunks(int64_t step, int64_t max_bytes, bool wait_for_slot,
                      const std::atomic<bool>* stop, std::vector<Chunk>* captured);
  bool record(const Chunk& chunk, FilledSlot* filled);
  void gather_chunk(const Chunk& chunk, std::byte* out, FilledSlot* filled) const;
  void submit(FilledSlot filled, bool is_last);
  void check(FilledSlot* filled) noexcept;  // on the checker's thread
  void write(FilledSlot filled);            // on the writer's thread
  void write_chunks(const FilledSlot& filled);
  void fail_locked(std::exception_ptr error);

  SnapshotPipeline& pipeline_;
  const CapturePlan plan_;
  std::vector<int64_t> rows_per_chunk_;          // per table
  std::vector<std::unique_ptr<KeptRows>> kept_;  // per table; none without copy on write
  SegmentWriter writer_;                         // the writer's thread, then finish()'s caller

  std::mutex capture_mutex_;  // held by capture() and keep(), guards these; taken before mutex_
  int next_table_ = 0;
  int64_t next_row_ = 0;

  mutable std::mutex mutex_;  // guards all below
  mutable std::condition_variable changed_;
  JobState state_ = JobState::kCapturing;
  std::vector<Chunk> chunks_;
  int64_t slots_in_flight_ = 0;  // checked or written; while > 0 the writer's thread owns writer_
  bool finishing_ = false;       // finish() owns writer_
  bool finished_ = false;
  std::exception_ptr error_;
};

class SnapshotPipeline {
 public:
  // `keep_bytes`: most memory for rows that wait to be captured after they have changed.
  // `stagers`: of the devices that tables lie on; the slots are pinned for them.
  SnapshotPipeline(int num_slots, int64_t slot_bytes, int64_t keep_bytes,
                   std::shared_ptr<ThreadPool> threads,
                   std::vector<std::shared_ptr<DeviceStager>> stagers = {});
  // Writes what is queued, then ends. REQUIRES: every job but those queued has been destroyed.
  ~SnapshotPipeline();
  SnapshotPipeline(const SnapshotPipeline&) = delete;
  SnapshotPipeline& operator=(const SnapshotPipeline&) = delete;

  // Throws UsageError if the plan does not fit the slots.
  std::shared_ptr<SegmentJob> start(CapturePlan plan);

  SlotPool& slots() { return slots_; }
  KeepArena& keep_arena() { return keep_arena_; }
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

  // Slots that devices copy to without holding anyone up, until they are freed.
  class PinnedSlots {
   public:
    PinnedSlots(SlotPool& slots, std::vector<std::shared_ptr<DeviceStager>> stagers);
    ~PinnedSlots() { unpin(); }
    PinnedSlots(const PinnedSlots&) = delete;
    PinnedSlots& operator=(const PinnedSlots&) = delete;

   private:
    void unpin() noexcept;

    const std::vector<std::shared_ptr<DeviceStager>> stagers_;
    std::vector<std::byte*> pinned_;
  };

  SlotPool slots_;
  const PinnedSlots pinned_;
  KeepArena keep_arena_;
  const std::shared_ptr<ThreadPool> threads_;
  Queue to_check_;
  Queue to_write_;
  WorkLog log_;
  std::thread checker_thread_;
  std::thread writer_thread_;
};

}  // namespace cpr_ext
