#include "pipeline/segment_job.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "core/crc32c.h"
#include "core/error.h"
#include "pipeline/snapshot_pipeline.h"
#include "staging/find_nan.h"
#include "staging/row_copy.h"
#include "staging/row_rounding.h"

namespace cpr_ext {

namespace {

int64_t block_bytes_of(const std::vector<SegmentTable>& tables) {
  const int64_t block_bytes = tables.empty() ? kAlignment : tables.front().block_bytes;
  for (const SegmentTable& table : tables) {
    if (table.block_bytes == block_bytes) continue;
    throw UsageError("tables '" + tables.front().name + "' and '" + table.name +
                     "' of a segment have different block_bytes");
  }
  return block_bytes;
}

// A row is whole only if one memory holds all of it, as its stream sees it at one moment.
void check_devices(const SegmentTable& table) {
  for (const SegmentArray& array : table.arrays) {
    if (array.rows.stager != table.arrays.front().rows.stager) {
      throw UsageError("table '" + table.name + "': " + array.name + " and " +
                       table.arrays.front().name + " lie on different devices; move them to one");
    }
  }
}

// Each block is searched and summed while it is in the second-level cache.
constexpr int64_t kBlockBytes = 256 * 1024;

// position: in the segment's rows of the table.
[[noreturn]] void refuse_row(const SegmentTable& table, const int64_t* row_ids,
                             const SegmentArray& array, int64_t position) {
  const int64_t row_id = row_ids == nullptr ? table.range_begin + position : row_ids[position];
  throw NanError("table '" + table.name + "', row " + std::to_string(row_id) + ": " + array.name +
                 (array.is_rounded() ? " is NaN or infinite" : " is NaN") +
                 "; the snapshot is given up and earlier ones are kept. " +
                 "Look for divergence, or save NaN rows with on_nan=\"save\"");
}

// The checksum of `padded_bytes`, of which elements of `dtype` fill `bytes`; the position of the
// first that is NaN in `nan`, if it is asked for.
uint32_t check_bytes(const std::byte* data, int64_t padded_bytes, int64_t bytes, DType dtype,
                     int64_t* nan) {
  uint32_t crc = 0;
  for (int64_t begin = 0; begin < padded_bytes; begin += kBlockBytes) {
    const int64_t size = std::min(kBlockBytes, padded_bytes - begin);
    if (nan != nullptr && *nan < 0 && begin < bytes) {
      const int64_t item_bytes = item_size(dtype);
      const int64_t count = std::min(size, bytes - begin) / item_bytes;
      const int64_t at = find_nan(dtype, data + begin, count);
      if (at >= 0) *nan = begin / item_bytes + at;
    }
    crc = crc32c_extend(crc, data + begin, static_cast<size_t>(size));
  }
  return crc;
}

// The CRC32C of each piece of `chunk`, whose bytes lie in `data` one piece after the other.
// row_ids: of the chunk's table, all of them; null for a range.
// Throws NanError, naming table, row and array, for the first NaN, if `refuse_nan`.
std::vector<uint32_t> check_captured(const SegmentTable& table, const int64_t* row_ids,
                                     const Chunk& chunk, const std::byte* data, bool refuse_nan) {
  std::vector<uint32_t> checksums;
  const auto pieces = chunk_pieces(table, chunk.first, chunk.count);
  auto piece = pieces.begin();
  if (row_ids != nullptr) {
    checksums.push_back(check_bytes(data, piece->size_bytes, 0, DType::kInt64, nullptr));
    data += piece++->bytes_in_memory();
  }
  for (const SegmentArray& array : table.arrays) {
    const bool look = refuse_nan && item_size(array.rows.dtype) > 0 && !array.is_rounded();
    if (refuse_nan && array.is_rounded()) {
      const int64_t row = find_nan_row(
          data, array.precision, array.rows.row_bytes / item_size(array.rows.dtype), chunk.count);
      if (row >= 0) refuse_row(table, row_ids, array, chunk.first + row);
    }
    int64_t nan = -1;
    checksums.push_back(check_bytes(data, piece->size_bytes, chunk.count * array.file_row_bytes(),
                                    array.rows.dtype, look ? &nan : nullptr));
    if (nan >= 0) {
      const int64_t row = nan * item_size(array.rows.dtype) / array.file_row_bytes();
      refuse_row(table, row_ids, array, chunk.first + row);
    }
    data += piece++->bytes_in_memory();
  }
  return checksums;
}

}  // namespace

SegmentJob::SegmentJob(SnapshotPipeline& pipeline, CapturePlan plan)
    : pipeline_(pipeline),
      plan_(std::move(plan)),
      writer_(plan_.path, plan_.header_bytes, plan_.file_bytes, block_bytes_of(plan_.tables),
              plan_.direct_io) {
  for (size_t i = 0; i < plan_.tables.size(); ++i) {
    const SegmentTable& table = plan_.tables[i];
    rows_per_chunk_.push_back(
        cpr_ext::rows_per_chunk(table, pipeline_.slots().slot_bytes(), plan_.max_chunk_bytes));
    check_devices(table);
  }
}

std::vector<Chunk> SegmentJob::capture(int64_t step, int64_t max_bytes, bool wait_for_slot,
                                       const std::atomic<bool>* stop) {
  std::lock_guard<std::mutex> one_capture(capture_mutex_);
  std::vector<Chunk> captured;
  if (state() != JobState::kCapturing) return captured;
  try {
    capture_chunks(step, max_bytes, wait_for_slot, stop, &captured);
  } catch (...) {
    fail(std::current_exception());  // else chunks recorded but never written would count as saved
    throw;
  }
  return captured;
}

void SegmentJob::capture_chunks(int64_t step, int64_t max_bytes, bool wait_for_slot,
                                const std::atomic<bool>* stop, std::vector<Chunk>* captured) {
  const int64_t slot_bytes = pipeline_.slots().slot_bytes();
  const int num_tables = static_cast<int>(plan_.tables.size());
  // What may be stopped runs beside training, which has the cores: a small chunk would wait for
  // other threads to get one.
  ThreadPool* const threads = stop == nullptr ? pipeline_.threads_.get() : nullptr;
  int64_t captured_bytes = 0;
  FilledSlot open;
  int64_t open_bytes = 0;
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
    if (open.slot && open_bytes + bytes > slot_bytes) {
      submit(std::exchange(open, FilledSlot()), false);
      open_bytes = 0;
    }
    if (!open.slot) {
      open.slot = wait_for_slot ? pipeline_.slots().acquire() : pipeline_.slots().try_acquire();
      if (!open.slot) break;
    }
    Chunk chunk{next_table_, next_row_, count, step, {}};
    open.offsets.push_back(open_bytes);
    gather_chunk(chunk, threads, open.slot.data() + open_bytes, &open);
    if (!record(chunk, bytes, &open)) return;
    if (plan_.observer != nullptr) plan_.observer->captured(chunk.table, chunk.first, chunk.count);
    open_bytes += bytes;
    captured_bytes += bytes;
    next_row_ += count;
    captured->push_back(std::move(chunk));
    if (stop != nullptr && stop->load(std::memory_order_relaxed)) break;
  }
  submit(std::move(open), next_table_ == num_tables);
}

// False if the job has failed meanwhile: the caller must not take the rows for saved.
bool SegmentJob::record(const Chunk& chunk, int64_t bytes, FilledSlot* filled) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (state_ == JobState::kFailed) return false;
  filled->indices.push_back(chunks_.size());
  chunks_.push_back(chunk);
  captured_bytes_ += bytes;
  return true;
}

void SegmentJob::gather_chunk(const Chunk& chunk, ThreadPool* threads, std::byte* out,
                              FilledSlot* filled) {
  const SegmentTable& table = plan_.tables[chunk.table];
  std::byte* const begin = out;
  const auto pad = [&out, &table](int64_t bytes) {  // as far as it goes to the file
    std::memset(out + bytes, 0, align_up(bytes, table.block_bytes) - bytes);
    out += align_up(bytes);
  };
  const int64_t* row_ids = nullptr;  // of the rows to look for; null: they lie in a row
  int64_t first_row_id = table.range_begin + chunk.first;
  if (!table.is_range()) {
    std::memcpy(out, plan_.row_ids[chunk.table]->data() + chunk.first,
                chunk.count * sizeof(int64_t));
    row_ids = reinterpret_cast<const int64_t*>(out);  // for devices: the slot is pinned
    pad(chunk.count * static_cast<int64_t>(sizeof(int64_t)));
  }
  if (table.is_packed) {
    row_ids = nullptr;
    first_row_id = chunk.first;
  }
  std::vector<StagedArray> on_device;
  for (const SegmentArray& array : table.arrays) {
    if (array.rows.stager != nullptr) {
      on_device.push_back({array.rows, out - begin, array.precision});
    } else if (array.is_rounded()) {
      gather_rounded({&array.rows, row_ids, first_row_id, chunk.count}, array.precision, out,
                     threads);
    } else if (row_ids == nullptr) {
      gather_range(array.rows, first_row_id, chunk.count, out, threads);
    } else {
      gather_rows(array.rows, row_ids, chunk.count, out, threads);
    }
    pad(chunk.count * array.file_row_bytes());
  }
  if (!on_device.empty()) {
    const StagedRows rows{row_ids, first_row_id, chunk.count, table.is_packed};
    filled->arrivals.push_back(on_device.front().rows.stager->gather(on_device, rows, begin));
  }
}

// Hands over a slot (or none, if nothing was left to capture). The last slot is counted in the same
// critical section that ends the capture: the writer, done with the one before, must not find
// everything captured and nothing in flight.
void SegmentJob::submit(FilledSlot filled, bool is_last) {
  const bool has_slot = static_cast<bool>(filled.slot);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (state_ == JobState::kFailed) return;
    if (has_slot) ++slots_in_flight_;
    if (is_last) state_ = slots_in_flight_ == 0 ? JobState::kWritten : JobState::kCaptured;
  }
  changed_.notify_all();
  if (!has_slot) return;
  try {
    pipeline_.enqueue({shared_from_this(), std::move(filled)});
  } catch (...) {
    std::lock_guard<std::mutex> lock(mutex_);
    --slots_in_flight_;
    throw;
  }
}

// Sees to it that the disk does not wait for checksums; an error goes on to write(), which ends the
// job.
void SegmentJob::check(FilledSlot* filled) noexcept {
  try {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (state_ == JobState::kFailed) return;
      for (const size_t index : filled->indices) filled->chunks.push_back(chunks_[index]);
    }
    for (const auto& arrival : filled->arrivals) arrival->wait();
    for (size_t i = 0; i < filled->chunks.size(); ++i) {
      Chunk& chunk = filled->chunks[i];
      std::byte* const data = filled->slot.data() + filled->offsets[i];
      const SegmentTable& table = plan_.tables[chunk.table];
      const int64_t* row_ids = table.is_range() ? nullptr : plan_.row_ids[chunk.table]->data();
      chunk.checksums = check_captured(table, row_ids, chunk, data, plan_.refuse_nan);
    }
  } catch (...) {
    filled->error = std::current_exception();
  }
}

void SegmentJob::write_chunks(const FilledSlot& filled) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (state_ == JobState::kFailed) return;
  }
  if (filled.error) std::rethrow_exception(filled.error);
  std::vector<Piece> pieces;  // of chunks that follow each other in the slot
  int64_t begin = 0, end = 0;
  for (size_t i = 0; i < filled.chunks.size(); ++i) {
    const Chunk& chunk = filled.chunks[i];
    if (filled.offsets[i] != end) {
      writer_.write(pieces, filled.slot.data() + begin);
      pieces.clear();
      begin = end = filled.offsets[i];
    }
    for (const Piece& piece : chunk_pieces(plan_.tables[chunk.table], chunk.first, chunk.count)) {
      pieces.push_back(piece);
      end += piece.bytes_in_memory();
    }
  }
  writer_.write(pieces, filled.slot.data() + begin);
  std::lock_guard<std::mutex> lock(mutex_);
  for (size_t i = 0; i < filled.chunks.size(); ++i) {
    chunks_[filled.indices[i]] = filled.chunks[i];
  }
}

void SegmentJob::write(FilledSlot filled) {
  std::exception_ptr error;
  try {
    write_chunks(filled);
  } catch (...) {
    error = std::current_exception();
  }
  filled.arrivals.clear();    // of a job given up, too: a device may still write to the slot
  filled.slot = SlotLease();  // free before anyone is told
  {
    std::lock_guard<std::mutex> lock(mutex_);
    --slots_in_flight_;
    if (error) fail_locked(error);
    if (state_ == JobState::kFailed && slots_in_flight_ == 0) writer_.abandon();
    if (state_ == JobState::kCaptured && slots_in_flight_ == 0) state_ = JobState::kWritten;
  }
  changed_.notify_all();
}

JobState SegmentJob::state() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return state_;
}

bool SegmentJob::settle(JobState state, std::chrono::duration<double> timeout) const {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(lock, timeout, [&] {
    if (state_ == JobState::kFailed) return slots_in_flight_ == 0 && !finishing_;
    return state_ >= state;
  });
}

bool SegmentJob::wait(JobState state, std::chrono::duration<double> timeout) const {
  const bool settled = settle(state, timeout);
  std::lock_guard<std::mutex> lock(mutex_);
  if (state_ == JobState::kFailed) std::rethrow_exception(error_);
  return settled;
}

int64_t SegmentJob::captured_bytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return captured_bytes_;
}

std::vector<Chunk> SegmentJob::chunks() const {
  std::lock_guard<std::mutex> lock(mutex_);
  if (state_ == JobState::kFailed) std::rethrow_exception(error_);
  if (state_ < JobState::kWritten) throw UsageError("chunks() before all rows are written");
  return chunks_;
}

void SegmentJob::finish(const std::string& header) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (state_ == JobState::kFailed) std::rethrow_exception(error_);
    if (state_ < JobState::kWritten) throw UsageError("finish() before all rows are written");
    if (finishing_ || finished_) throw UsageError("finish() was called before");
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
    if (error) fail_locked(error);
    error = error_;  // the job's, if it was given up meanwhile: nobody will commit the file
    if (error) {
      writer_.abandon();
    } else {
      writer_.keep();
      finished_ = true;
    }
  }
  changed_.notify_all();
  if (error) std::rethrow_exception(error);
}

void SegmentJob::mark_committed() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (state_ == JobState::kFailed && !finished_) std::rethrow_exception(error_);
    if (!finished_) throw UsageError("mark_committed() before finish()");
    if (state_ == JobState::kWritten) state_ = JobState::kCommitted;
  }
  changed_.notify_all();
}

void SegmentJob::fail_locked(std::exception_ptr error) {
  if (state_ == JobState::kFailed || state_ == JobState::kCommitted) return;
  state_ = JobState::kFailed;
  error_ = error;
}

void SegmentJob::fail(std::exception_ptr error) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    fail_locked(error);
    // Else whoever owns the writer does it.
    const bool is_idle = slots_in_flight_ == 0 && !finishing_;
    if (state_ == JobState::kFailed && is_idle) writer_.abandon();
  }
  changed_.notify_all();
}

void SegmentJob::cancel(const std::string& reason) {
  fail(std::make_exception_ptr(std::runtime_error(reason)));
}

}  // namespace cpr_ext
