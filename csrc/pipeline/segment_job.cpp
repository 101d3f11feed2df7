#include "pipeline/segment_job.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/error.h"
#include "core/sort_row_ids.h"
#include "pipeline/chunk_check.h"
#include "pipeline/exact_rows.h"
#include "pipeline/snapshot_pipeline.h"
#include "staging/row_copy.h"
#include "staging/row_rounding.h"

namespace cpr_ext {

namespace {

bool is_on_device(const SegmentTable& table) {
  return !table.arrays.empty() && table.arrays.front().rows.stager != nullptr;
}

// Whether the chunks of the table are not known before their rows have arrived from a device: which
// of them are exact, or how row ids are packed, which the device reads as they are.
bool is_completed_later(const SegmentTable& table) {
  return is_on_device(table) && (table.exact_row_bytes() > 0 || !table.packed_ids.empty());
}

// Bytes before a chunk in a slot. Row ids that are packed in the file are there as they are, for
// the device; the chunk, which begins with the packed ones, takes the place of their end.
int64_t bytes_ahead(const SegmentTable& table, int64_t first, int64_t count) {
  if (table.packed_ids.empty() || !is_on_device(table)) return 0;
  return align_up(count * kRowIdBytes) - row_ids_bytes(table, first, count);
}

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
void check_devices(const SegmentTable& table, bool copy_on_write) {
  for (const SegmentArray& array : table.arrays) {
    if (array.rows.stager != table.arrays.front().rows.stager) {
      throw UsageError("table '" + table.name + "': " + array.name + " and " +
                       table.arrays.front().name + " lie on different devices; move them to one");
    }
    if (array.rows.stager != nullptr && copy_on_write) {
      throw UsageError("table '" + table.name +
                       "' lies on a device: its rows are not copied before they change");
    }
  }
  if (table.is_packed && copy_on_write) {
    throw UsageError("table '" + table.name + "' is packed: its rows do not change");
  }
}

}  // namespace

SegmentJob::SegmentJob(SnapshotPipeline& pipeline, CapturePlan plan)
    : pipeline_(pipeline),
      plan_(std::move(plan)),
      writer_(plan_.path, plan_.header_bytes, plan_.file_bytes, block_bytes_of(plan_.tables),
              plan_.direct_io),
      next_exact_offset_(plan_.file_bytes) {
  for (size_t i = 0; i < plan_.tables.size(); ++i) {
    const SegmentTable& table = plan_.tables[i];
    rows_per_chunk_.push_back(
        cpr_ext::rows_per_chunk(table, pipeline_.slots().slot_bytes(), plan_.max_chunk_bytes));
    check_devices(table, plan_.copy_on_write);
    if (!plan_.copy_on_write) continue;
    copies_.push_back(std::make_unique<CopyOnWrite>(table, plan_.row_ids[i].get(),
                                                    rows_per_chunk_[i], pipeline_.copy_arena()));
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

void SegmentJob::copy_before_write(std::vector<ChangingRows>* changing) {
  if (copies_.empty()) throw UsageError("copy_before_write() of a job without copy on write");
  std::lock_guard<std::mutex> no_capture(capture_mutex_);
  const bool is_capturing = state() == JobState::kCapturing;
  for (ChangingRows& rows : *changing) {
    rows.done = rows.count;
    if (is_capturing && rows.table >= next_table_) copy_rows(&rows);
  }
}

void SegmentJob::copy_rows(ChangingRows* rows) {
  const int64_t rows_per_chunk = rows_per_chunk_[rows->table];
  const int64_t captured_rows = rows->table > next_table_ ? 0 : next_row_;
  const int64_t captured_chunks = (captured_rows + rows_per_chunk - 1) / rows_per_chunk;
  CopyOnWrite& copies = *copies_[rows->table];
  told_.clear();
  rows->done = copies.copy_before_write(rows->row_ids, rows->count, captured_chunks, &told_);
  if (plan_.observer == nullptr || told_.empty()) return;
  sort_row_ids(&told_);
  plan_.observer->copied_before_write(rows->table, told_);
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
    const bool may_grow = table.exact_row_bytes() > 0 || is_completed_later(table);
    int64_t bytes = chunk_bytes(table, next_row_, count);
    if (captured_bytes > 0 && max_bytes > 0 && captured_bytes + bytes > max_bytes) break;
    const int64_t most_bytes = may_grow ? most_chunk_bytes(table, count) : bytes;
    if (open.slot && open_bytes + most_bytes > slot_bytes) {
      submit(std::exchange(open, FilledSlot()), false);
      open_bytes = 0;
    }
    if (!open.slot) {
      open.slot = wait_for_slot ? pipeline_.slots().acquire() : pipeline_.slots().try_acquire();
      if (!open.slot) break;
    }
    Chunk chunk{next_table_, next_row_, count, step, {}, {}, 0};
    open.offsets.push_back(open_bytes + bytes_ahead(table, next_row_, count));
    const bool is_whole = copies_.empty() || !copies_[next_table_]->has_copies(chunk.first);
    gather_chunk(&chunk, threads, open.slot.data() + open.offsets.back(), &open);
    if (!record(chunk, &open)) return;
    if (plan_.observer != nullptr) tell_observer(chunk, is_whole);
    bytes += align_up(chunk.exact.count * table.exact_row_bytes());
    open_bytes += is_completed_later(table) ? most_bytes : bytes;
    captured_bytes += bytes;
    next_row_ += count;
    captured->push_back(std::move(chunk));
    if (stop != nullptr && stop->load(std::memory_order_relaxed)) break;
  }
  submit(std::move(open), next_table_ == num_tables);
}

// False if the job has failed meanwhile: the caller must not take the rows for saved.
bool SegmentJob::record(const Chunk& chunk, FilledSlot* filled) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (state_ == JobState::kFailed) return false;
  filled->indices.push_back(chunks_.size());
  chunks_.push_back(chunk);
  return true;
}

void SegmentJob::tell_observer(const Chunk& chunk, bool is_whole) {
  if (is_whole) {
    plan_.observer->captured(chunk.table, chunk.first, chunk.count);
    return;
  }
  told_.clear();
  copies_[chunk.table]->list_waiting(chunk.first, chunk.count, &told_);
  if (!told_.empty()) plan_.observer->captured_rows(chunk.table, told_);
}

void SegmentJob::gather_chunk(Chunk* chunk, ThreadPool* threads, std::byte* out,
                              FilledSlot* filled) {
  const SegmentTable& table = plan_.tables[chunk->table];
  std::byte* const begin = out;
  const auto pad = [&out](int64_t bytes) {
    std::memset(out + bytes, 0, align_up(bytes) - bytes);
    out += align_up(bytes);
  };
  const int64_t* row_ids = nullptr;  // of the rows to look for; null: they lie in a row
  int64_t first_row_id = table.range_begin + chunk->first;
  if (!table.is_range()) {
    row_ids = plan_.row_ids[chunk->table]->data() + chunk->first;
    if (table.packed_ids.empty()) {
      std::memcpy(out, row_ids, chunk->count * sizeof(int64_t));
      pad(chunk->count * static_cast<int64_t>(sizeof(int64_t)));
    } else if (is_on_device(table)) {  // they are packed later
      const int64_t ahead = bytes_ahead(table, chunk->first, chunk->count);
      std::memcpy(out - ahead, row_ids, chunk->count * sizeof(int64_t));
      out += row_ids_bytes(table, chunk->first, chunk->count);
    } else {
      const RowIdRun run{chunk->count, row_ids[0], row_ids[chunk->count - 1]};
      pack_row_ids(row_ids, run, out);
      pad(packed_bytes(run));
    }
  }
  if (table.is_packed) {
    row_ids = nullptr;
    first_row_id = chunk->first;
  }
  if (table.exact_row_bytes() > 0) broken_.assign(chunk->count, 0);
  std::vector<StagedArray> on_device;
  for (const SegmentArray& array : table.arrays) {
    if (array.rows.stager != nullptr) {
      on_device.push_back({array.rows, out - begin, array.precision, 0});
    } else if (array.is_rounded()) {
      const RowsOf rows{&array.rows, row_ids, first_row_id, chunk->count};
      const float error = gather_rounded(rows, array.precision, out, broken_.data(), threads);
      chunk->largest_error = std::max(chunk->largest_error, error);
    } else if (row_ids == nullptr) {
      gather_range(array.rows, first_row_id, chunk->count, out, threads);
    } else {
      gather_rows(array.rows, row_ids, chunk->count, out, threads);
    }
    pad(chunk->count * array.file_row_bytes());
  }
  if (!on_device.empty()) {
    const int64_t room = out - begin;  // for exact rows
    for (size_t i = 0; i < on_device.size(); ++i) {
      on_device[i].exact_offset = room + room_for_exact(table, chunk->count, table.arrays[i]);
    }
    // The row ids as they lie in the slot: its memory is pinned.
    const std::byte* ids = begin - bytes_ahead(table, chunk->first, chunk->count);
    const StagedRows rows{row_ids == nullptr ? nullptr : reinterpret_cast<const int64_t*>(ids),
                          first_row_id, chunk->count, room, table.is_packed};
    filled->arrivals.push_back(on_device.front().rows.stager->gather(on_device, rows, begin));
    return;
  }
  OverlaidRows overlaid{broken_.data(), {}, 0};
  if (!copies_.empty()) {
    const auto observe = [&](const CopiedRows& copies) {
      if (plan_.observer != nullptr) plan_.observer->captured_copies(chunk->table, copies);
    };
    copies_[chunk->table]->overlay(chunk->first, chunk->count, begin, &overlaid, observe);
    chunk->largest_error = std::max(chunk->largest_error, overlaid.largest_error);
  }
  if (table.exact_row_bytes() > 0) {
    const auto row_at = [&](const SegmentArray& array, int64_t i) {
      return RowsOf{&array.rows, row_ids, first_row_id, chunk->count}.row(i);
    };
    chunk->exact.count = gather_exact(table, broken_, overlaid, row_at, out);
    pad(chunk->exact.count * table.exact_row_bytes());
  }
}

// What a chunk of `data` lacked until its rows had arrived. Exact rows get their places in the file
// in the order of the chunks, whoever has rounded them.
void SegmentJob::complete_on_host(std::byte* data, Chunk* chunk) {
  const SegmentTable& table = plan_.tables[chunk->table];
  const auto pad = [](std::byte* from, int64_t bytes) {
    std::memset(from + bytes, 0, align_up(bytes) - bytes);
  };
  if (is_on_device(table) && !table.packed_ids.empty()) {
    const RowIdRun run = packed_run(table, chunk->first, chunk->count);
    pack_row_ids(plan_.row_ids[chunk->table]->data() + chunk->first, run, data);
    pad(data, packed_bytes(run));
  }
  if (table.exact_row_bytes() == 0) return;
  if (is_on_device(table)) {
    std::byte* const exact = data + chunk_bytes(table, chunk->first, chunk->count);
    pack_exact(table, exact, chunk);
    pad(exact, chunk->exact.count * table.exact_row_bytes());
  }
  chunk->exact.first = chunk->first;
  chunk->exact.file_offset = next_exact_offset_;
  next_exact_offset_ += align_up(chunk->exact.count * table.exact_row_bytes(), table.block_bytes);
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
      complete_on_host(data, &chunk);
      chunk.checksums = check_captured(table, row_ids, chunk, data, plan_.refuse_nan);
      if (plan_.observer != nullptr) plan_.observer->checked(chunk, data);
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
    for (const Piece& piece : chunk_pieces(plan_.tables[chunk.table], chunk)) {
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
    if (state_ == JobState::kFailed) {
      for (const auto& kept : copies_) kept->release();  // no chunk of it will be read any more
    }
  }
  changed_.notify_all();
}

void SegmentJob::cancel(const std::string& reason) {
  fail(std::make_exception_ptr(std::runtime_error(reason)));
}

}  // namespace cpr_ext
