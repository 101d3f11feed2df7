#include <algorithm>
#include <cassert>
#include <cstring>

#include "core/error.h"
#include "pipeline/snapshot_pipeline.h"
#include "staging/find_nan.h"
#include "staging/row_copy.h"

namespace cpr_ext {

SegmentJob::SegmentJob(SnapshotPipeline& pipeline, CapturePlan plan)
    : pipeline_(pipeline),
      plan_(std::move(plan)),
      writer_(plan_.path, plan_.header_bytes, plan_.file_bytes, plan_.direct_io) {
  for (const SegmentTable& table : plan_.tables) {
    rows_per_chunk_.push_back(cpr_ext::rows_per_chunk(table, pipeline_.slots().slot_bytes()));
  }
}

std::vector<Chunk> SegmentJob::capture(int64_t step, int64_t max_bytes, bool wait_for_slot) {
  std::vector<Chunk> captured;
  int64_t captured_bytes = 0;
  const int64_t slot_bytes = pipeline_.slots().slot_bytes();
  const int num_tables = static_cast<int>(plan_.tables.size());
  if (state() != JobState::kCapturing) return captured;
  while (next_table_ < num_tables) {
    const SegmentTable& table = plan_.tables[next_table_];
    if (next_row_ == table.num_rows) {
      ++next_table_;
      next_row_ = 0;
      continue;
    }
    const int64_t count = std::min(rows_per_chunk_[next_table_], table.num_rows - next_row_);
    const int64_t bytes = chunk_bytes(table, count);
    if (captured_bytes > 0 && max_bytes > 0 && captured_bytes + bytes > max_bytes) break;
    if (open_.slot && open_bytes_ + bytes > slot_bytes) submit_open_slot();
    if (!open_.slot) {
      open_.slot = wait_for_slot ? pipeline_.slots().acquire() : pipeline_.slots().try_acquire();
      if (!open_.slot) break;
    }
    Chunk chunk{next_table_, next_row_, count, step, {}};
    gather_chunk(chunk, open_.slot.data() + open_bytes_);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (state_ == JobState::kFailed) {
        // Not reported as captured: the caller must not take the row for saved.
        open_ = FilledSlot();
        return captured;
      }
      open_.chunks.push_back(chunks_.size());
      chunks_.push_back(chunk);
    }
    open_bytes_ += bytes;
    captured_bytes += bytes;
    next_row_ += count;
    captured.push_back(std::move(chunk));
  }
  if (next_table_ == num_tables) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (state_ == JobState::kCapturing) {
        all_captured_ = true;
        state_ = slots_in_flight_ == 0 && !open_.slot ? JobState::kWritten : JobState::kCaptured;
      }
    }
    changed_.notify_all();
    if (open_.slot) submit_open_slot();
  }
  return captured;
}

void SegmentJob::gather_chunk(const Chunk& chunk, std::byte* out) const {
  const SegmentTable& table = plan_.tables[chunk.table];
  ThreadPool* threads = pipeline_.threads_.get();
  const auto pad = [&out](int64_t bytes) {
    std::memset(out + bytes, 0, align_up(bytes) - bytes);
    out += align_up(bytes);
  };
  const int64_t* row_ids = nullptr;
  if (!table.is_range()) {
    row_ids = plan_.row_ids[chunk.table].data() + chunk.first;
    std::memcpy(out, row_ids, chunk.count * sizeof(int64_t));
    pad(chunk.count * static_cast<int64_t>(sizeof(int64_t)));
  }
  for (const SegmentArray& array : table.arrays) {
    if (row_ids == nullptr) {
      gather_range(array.rows, table.range_begin + chunk.first, chunk.count, out, threads);
    } else {
      gather_rows(array.rows, row_ids, chunk.count, out, threads);
    }
    pad(chunk.count * array.rows.row_bytes);
  }
}

void SegmentJob::submit_open_slot() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ++slots_in_flight_;
  }
  pipeline_.enqueue({shared_from_this(), std::move(open_)});
  open_ = FilledSlot();
  open_bytes_ = 0;
}

void SegmentJob::check_nan(const Chunk& chunk, const std::byte* data) const {
  const SegmentTable& table = plan_.tables[chunk.table];
  if (!table.is_range()) data += align_up(chunk.count * static_cast<int64_t>(sizeof(int64_t)));
  for (const SegmentArray& array : table.arrays) {
    const int64_t bytes = chunk.count * array.rows.row_bytes;
    const int64_t item_bytes = item_size(array.rows.dtype);
    const int64_t at = item_bytes == 0 ? -1 : find_nan(array.rows.dtype, data, bytes / item_bytes);
    if (at >= 0) {
      const int64_t position = chunk.first + at * item_bytes / array.rows.row_bytes;
      const int64_t row_id =
          table.is_range() ? table.range_begin + position : plan_.row_ids[chunk.table][position];
      throw NanError("table '" + table.name + "', row " + std::to_string(row_id) + ": " +
                     array.name + " is NaN; the snapshot is given up and earlier ones are kept. " +
                     "Look for divergence, or save NaN rows with on_nan=\"save\"");
    }
    data += align_up(bytes);
  }
}

void SegmentJob::write(FilledSlot filled) {
  std::vector<Chunk> chunks;  // copies: chunks_ may grow while this slot is written
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (state_ != JobState::kFailed) {
      for (const size_t index : filled.chunks) chunks.push_back(chunks_[index]);
    }
  }
  try {
    std::vector<Piece> pieces;
    const std::byte* data = filled.slot.data();
    for (const Chunk& chunk : chunks) {
      if (plan_.refuse_nan) check_nan(chunk, data);
      const auto of_chunk = chunk_pieces(plan_.tables[chunk.table], chunk.first, chunk.count);
      for (const Piece& piece : of_chunk) data += piece.size_bytes;
      pieces.insert(pieces.end(), of_chunk.begin(), of_chunk.end());
    }
    const std::vector<uint32_t> checksums = writer_.write(pieces, filled.slot.data());
    filled.slot = SlotLease();  // free for the next capture before anyone is told
    std::lock_guard<std::mutex> lock(mutex_);
    auto checksum = checksums.begin();
    for (size_t i = 0; i < chunks.size(); ++i) {
      const auto count =
          chunk_pieces(plan_.tables[chunks[i].table], chunks[i].first, chunks[i].count).size();
      chunks_[filled.chunks[i]].checksums.assign(checksum, checksum + count);
      checksum += count;
    }
  } catch (...) {
    fail(std::current_exception());
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    --slots_in_flight_;
    if (state_ == JobState::kFailed) {
      if (slots_in_flight_ == 0) writer_.abandon();
    } else if (all_captured_ && slots_in_flight_ == 0) {
      state_ = JobState::kWritten;
    }
  }
  changed_.notify_all();
}

JobState SegmentJob::state() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return state_;
}

bool SegmentJob::wait(JobState state, std::chrono::duration<double> timeout) const {
  std::unique_lock<std::mutex> lock(mutex_);
  // kFailed is the last of the states, so it ends every wait.
  const bool reached = changed_.wait_for(lock, timeout, [&] { return state_ >= state; });
  if (state_ == JobState::kFailed) std::rethrow_exception(error_);
  return reached;
}

std::vector<Chunk> SegmentJob::chunks() const {
  std::lock_guard<std::mutex> lock(mutex_);
  assert(state_ == JobState::kWritten);
  return chunks_;
}

void SegmentJob::finish(const std::string& header) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (state_ == JobState::kFailed) std::rethrow_exception(error_);
    if (state_ != JobState::kWritten) throw UsageError("finish() before all rows are written");
    finishing_ = true;
  }
  std::exception_ptr error;
  try {
    writer_.finish(header);
  } catch (...) {
    error = std::current_exception();
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    finishing_ = false;
    if (state_ == JobState::kFailed) error = error_;  // given up meanwhile
    if (error) writer_.abandon();
  }
  if (error) {
    fail(error);
    std::rethrow_exception(error);
  }
}

void SegmentJob::mark_committed() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (state_ == JobState::kWritten) state_ = JobState::kCommitted;
  }
  changed_.notify_all();
}

void SegmentJob::fail(std::exception_ptr error) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (state_ == JobState::kFailed || state_ == JobState::kCommitted) return;
    state_ = JobState::kFailed;
    error_ = error;
    if (slots_in_flight_ == 0 && !finishing_) writer_.abandon();  // else its user does
  }
  changed_.notify_all();
}

void SegmentJob::cancel(const std::string& reason) {
  fail(std::make_exception_ptr(std::runtime_error(reason)));
  open_ = FilledSlot();
}

}  // namespace cpr_ext
