// One segment on its way to disk: captured in slots, checked, written, finished.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/row_id_vector.h"
#include "core/thread_pool.h"
#include "pipeline/segment_plan.h"
#include "staging/device_stager.h"
#include "staging/slot_pool.h"
#include "storage/segment_file.h"

namespace cpr_ext {

class SnapshotPipeline;

// In this order; kFailed ends it from any of them but kCommitted.
enum class JobState { kCapturing, kCaptured, kWritten, kCommitted, kFailed };

// Learns of each row of a job once: just after it was copied, before it may change; and of what
// goes to the file. An exception fails the job. Called by one thread at a time, but for checked().
class CaptureObserver {
 public:
  virtual ~CaptureObserver() = default;
  // Rows [first, first + count) of a table, by position.
  virtual void captured(int table, int64_t first, int64_t count) = 0;
};

// What to capture: the rows of each table, and where they go.
struct CapturePlan {
  std::string path;
  int64_t header_bytes = 0;
  int64_t file_bytes = 0;
  bool direct_io = true;
  bool refuse_nan = true;
  // Chunks are no larger than this (0: than a slot) where the alignment of the file allows it.
  int64_t max_chunk_bytes = 0;
  std::vector<SegmentTable> tables;
  std::vector<SharedRowIds> row_ids;          // per table (num_rows,), ascending; null for a range
  std::shared_ptr<CaptureObserver> observer;  // may be null
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

  JobState state() const;

  // Waits until `state` or a later one is reached, or the job has failed and nothing of it is left:
  // its slots are free and its file is removed. False if `timeout` passed first.
  bool settle(JobState state, std::chrono::duration<double> timeout) const;

  // As settle(), but rethrows the first error of a failed job, every time; at the time-out too.
  bool wait(JobState state, std::chrono::duration<double> timeout) const;

  // What all captured chunks took in slots.
  int64_t captured_bytes() const;

  // The captured chunks with their checksums. Throws UsageError before kWritten.
  std::vector<Chunk> chunks() const;

  // Writes the header and syncs, once. Throws UsageError before kWritten. An error fails the job
  // and is rethrown.
  void finish(const std::string& header);

  // The manifest names the segment. Throws UsageError unless it is finished.
  void mark_committed();

  // Aborts the job (kFailed) unless it is committed; the first error is kept. The file is
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
    std::vector<int64_t> offsets;                    // of its chunks in the slot
    std::vector<Chunk> chunks;                       // copies, with checksums once it is checked
    std::exception_ptr error;                        // of the check
  };
  void capture_chunks(int64_t step, int64_t max_bytes, bool wait_for_slot,
                      const std::atomic<bool>* stop, std::vector<Chunk>* captured);
  bool record(const Chunk& chunk, int64_t bytes, FilledSlot* filled);
  void gather_chunk(const Chunk& chunk, ThreadPool* threads, std::byte* out, FilledSlot* filled);
  void submit(FilledSlot filled, bool is_last);
  void check(FilledSlot* filled) noexcept;  // on the checker's thread
  void write(FilledSlot filled);            // on the writer's thread
  void write_chunks(const FilledSlot& filled);
  void fail_locked(std::exception_ptr error);

  SnapshotPipeline& pipeline_;
  const CapturePlan plan_;
  std::vector<int64_t> rows_per_chunk_;  // per table
  SegmentWriter writer_;                 // the writer's thread, then finish()'s caller

  std::mutex capture_mutex_;  // held by capture(), guards these; taken before mutex_
  int next_table_ = 0;
  int64_t next_row_ = 0;

  mutable std::mutex mutex_;  // guards all below
  mutable std::condition_variable changed_;
  JobState state_ = JobState::kCapturing;
  std::vector<Chunk> chunks_;
  int64_t captured_bytes_ = 0;
  int64_t slots_in_flight_ = 0;  // checked or written; while > 0 the writer's thread owns writer_
  bool finishing_ = false;       // finish() owns writer_
  bool finished_ = false;
  std::exception_ptr error_;
};

}  // namespace cpr_ext
