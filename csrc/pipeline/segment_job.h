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
#include "pipeline/copy_on_write.h"
#include "pipeline/segment_plan.h"
#include "staging/device_stager.h"
#include "staging/slot_pool.h"
#include "storage/segment_writer.h"

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
  // As captured(), of rows (n,) in ascending order: others of their chunk were copied before.
  virtual void captured_rows(int table, const RowIdVector& row_ids) = 0;
  // Rows in ascending order that are about to change.
  virtual void copied_before_write(int table, const RowIdVector& row_ids) = 0;
  // Their values, when their chunk is captured: training need not wait for what uses these. Must
  // not call the job.
  virtual void captured_copies(int table, const CopiedRows& copies) = 0;
  // The pieces of a chunk in its slot, as they will be in the file; on the checker's thread.
  virtual void checked(const Chunk& chunk, const std::byte* slot) = 0;
};

// Rows of a table that are about to change; `done` of them are seen to.
struct ChangingRows {
  int table = 0;
  const int64_t* row_ids = nullptr;  // (count,), in any order, some perhaps repeated; not owned
  int64_t count = 0;
  int64_t done = 0;
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
  bool copy_on_write = false;  // copy_before_write() may be called
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

  // Rows that are about to change: those not captured yet are copied, and are captured as they are
  // now. Sets `done`, to less than `count` if the memory for it is full: capture() frees some.
  // Throws UsageError unless the plan said copy_on_write.
  void copy_before_write(std::vector<ChangingRows>* changing);

  JobState state() const;

  // Waits until `state` or a later one is reached, or the job has failed and nothing of it is left:
  // its slots are free and its file is removed. False if `timeout` passed first.
  bool settle(JobState state, std::chrono::duration<double> timeout) const;

  // As settle(), but rethrows the first error of a failed job, every time; at the time-out too.
  bool wait(JobState state, std::chrono::duration<double> timeout) const;

  // The captured chunks with their checksums. Throws UsageError before kWritten.
  std::vector<Chunk> chunks() const;

  // Whether rows of a table are rounded.
  bool rounds(int table) const { return plan_.tables[table].exact_row_bytes() > 0; }

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
  void copy_rows(ChangingRows* rows);
  void capture_chunks(int64_t step, int64_t max_bytes, bool wait_for_slot,
                      const std::atomic<bool>* stop, std::vector<Chunk>* captured);
  bool record(const Chunk& chunk, FilledSlot* filled);
  void tell_observer(const Chunk& chunk, bool is_whole);
  void gather_chunk(Chunk* chunk, ThreadPool* threads, std::byte* out, FilledSlot* filled);
  void complete_on_host(std::byte* data, Chunk* chunk);
  void submit(FilledSlot filled, bool is_last);
  void check(FilledSlot* filled) noexcept;  // on the checker's thread
  void write(FilledSlot filled);            // on the writer's thread
  void write_chunks(const FilledSlot& filled);
  void fail_locked(std::exception_ptr error);

  SnapshotPipeline& pipeline_;
  const CapturePlan plan_;
  std::vector<int64_t> rows_per_chunk_;               // per table
  std::vector<std::unique_ptr<CopyOnWrite>> copies_;  // per table; none without copy on write
  SegmentWriter writer_;                              // the writer's thread, then finish()'s caller

  std::mutex capture_mutex_;  // held by capture() and copy_before_write(), guards these; taken
                              // before mutex_
  int next_table_ = 0;
  int64_t next_row_ = 0;
  std::vector<uint8_t> broken_;  // per row of a chunk: it is to be kept exactly
  RowIdVector told_;             // rows that the observer learns of next

  int64_t next_exact_offset_;  // in the file, after all that was planned; the checker's thread

  mutable std::mutex mutex_;  // guards all below
  mutable std::condition_variable changed_;
  JobState state_ = JobState::kCapturing;
  std::vector<Chunk> chunks_;
  int64_t slots_in_flight_ = 0;  // checked or written; while > 0 the writer's thread owns writer_
  bool finishing_ = false;       // finish() owns writer_
  bool finished_ = false;
  std::exception_ptr error_;
};

}  // namespace cpr_ext
