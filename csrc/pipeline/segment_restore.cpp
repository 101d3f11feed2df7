#include "pipeline/segment_restore.h"

#include <condition_variable>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "core/error.h"
#include "staging/device_stager.h"
#include "staging/row_copy.h"
#include "storage/segment_reader.h"

namespace cpr_ext {

namespace {

// One chunk as the reader hands it over.
struct ReadChunk {
  const Chunk* chunk;
  SlotLease slot;
  std::string damage;         // empty if every piece is good
  bool row_ids_good = false;  // the slot's first piece, the row ids, may be used
  int64_t bytes = 0;
};

// Bounded by the slots: the reader waits for one before it reads.
class Handover {
 public:
  void push(ReadChunk chunk) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      queue_.push_back(std::move(chunk));
    }
    ready_.notify_one();
  }
  void end(std::exception_ptr error) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ended_ = true;
      error_ = error;
    }
    ready_.notify_one();
  }
  std::optional<ReadChunk> pop() {
    std::unique_lock<std::mutex> lock(mutex_);
    ready_.wait(lock, [&] { return ended_ || !queue_.empty(); });
    if (!queue_.empty()) {
      ReadChunk chunk = std::move(queue_.front());
      queue_.pop_front();
      return chunk;
    }
    if (error_) std::rethrow_exception(error_);
    return std::nullopt;
  }

 private:
  std::mutex mutex_;
  std::condition_variable ready_;
  std::deque<ReadChunk> queue_;
  bool ended_ = false;
  std::exception_ptr error_;
};

ReadChunk read_chunk(SegmentReader& reader, const SegmentTable& table, const Chunk& chunk,
                     SlotPool& slots) {
  ReadChunk read{&chunk, slots.acquire(), "", false, 0};
  const std::vector<Piece> pieces = chunk_pieces(table, chunk.first, chunk.count);
  std::byte* data = read.slot.data();
  for (size_t i = 0; i < pieces.size(); ++i) {
    const std::string damage = reader.read(pieces[i], chunk.checksums[i], data);
    read.bytes += pieces[i].size_bytes;
    data += pieces[i].size_bytes;
    if (damage.empty() && i == 0) read.row_ids_good = !table.is_range();
    if (!damage.empty() && read.damage.empty()) read.damage = damage;
  }
  return read;
}

// The wanted rows of a chunk are a run, as its row ids ascend: [begin, end) of its positions.
struct Run {
  int64_t begin;
  int64_t end;
};

Run wanted_run(const RestoreTable& wanted, const int64_t* row_ids, const Chunk& chunk) {
  Run run{0, chunk.count};
  const auto row_id = [&](int64_t i) {
    return row_ids == nullptr ? wanted.table.range_begin + chunk.first + i : row_ids[i];
  };
  while (run.begin < run.end && row_id(run.begin) < wanted.wanted_begin) ++run.begin;
  while (run.begin < run.end && row_id(run.end - 1) >= wanted.wanted_end) --run.end;
  return run;
}

// Row ids come from the file: they are believed only if all ascend, and the wanted ones lie in
// every target. Others may be of rows that this process does not have.
std::string check_row_ids(const RestoreTable& wanted, const int64_t* row_ids, const Chunk& chunk) {
  const auto told = [](int64_t row_id) {
    return "row id " + std::to_string(row_id) + " is out of order or of range";
  };
  for (int64_t i = 0; i < chunk.count; ++i) {
    if (row_ids[i] < 0 || (i > 0 && row_ids[i] <= row_ids[i - 1])) return told(row_ids[i]);
  }
  const Run run = wanted_run(wanted, row_ids, chunk);
  if (run.begin == run.end) return "";
  for (const SegmentArray& array : wanted.table.arrays) {
    if (!array.rows.holds(row_ids[run.begin])) return told(row_ids[run.begin]);
    if (!array.rows.holds(row_ids[run.end - 1])) return told(row_ids[run.end - 1]);
  }
  return "";
}

// Scatters the wanted rows of an undamaged chunk.
void scatter_chunk(const SegmentTable& table, const Chunk& chunk, const int64_t* row_ids, Run run,
                   const std::byte* data, ThreadPool* threads) {
  const std::byte* const begin = data;
  std::vector<StagedArray> on_device;
  for (const SegmentArray& array : table.arrays) {
    const std::byte* packed = data + run.begin * array.rows.row_bytes;
    const int64_t count = run.end - run.begin;
    if (array.rows.stager != nullptr) {
      on_device.push_back({array.rows, packed - begin});
    } else if (row_ids == nullptr) {
      scatter_range(packed, table.range_begin + chunk.first + run.begin, count, array.rows,
                    threads);
    } else {
      scatter_rows(packed, row_ids + run.begin, count, array.rows, threads);
    }
    data += align_up(chunk.count * array.rows.row_bytes);
  }
  if (on_device.empty()) return;
  const StagedRows rows{row_ids == nullptr ? nullptr : row_ids + run.begin,
                        table.range_begin + chunk.first + run.begin, run.end - run.begin};
  on_device.front().rows.stager->scatter(on_device, rows, begin);
}

void take_in(const RestoreTable& wanted, ReadChunk read, ThreadPool* threads,
             RestoreResult* result) {
  const SegmentTable& table = wanted.table;
  const Chunk& chunk = *read.chunk;
  const std::byte* data = read.slot.data();
  const int64_t* row_ids = nullptr;
  if (!table.is_range()) {
    row_ids = reinterpret_cast<const int64_t*>(data);
    data += align_up(chunk.count * static_cast<int64_t>(sizeof(int64_t)));
    if (read.row_ids_good) {
      const std::string damage = check_row_ids(wanted, row_ids, chunk);
      read.row_ids_good = damage.empty();
      if (read.damage.empty()) read.damage = damage;
    }
  }
  result->bytes_read += read.bytes;
  const bool rows_known = table.is_range() || read.row_ids_good;
  const Run run = rows_known ? wanted_run(wanted, row_ids, chunk) : Run{0, 0};
  if (read.damage.empty()) {
    scatter_chunk(table, chunk, row_ids, run, data, threads);
    result->rows_restored[chunk.table] += run.end - run.begin;
    return;
  }
  DamagedChunk damaged{chunk.table, chunk.first, chunk.count, read.damage, rows_known, {}};
  for (int64_t i = run.begin; i < run.end; ++i) {
    damaged.row_ids.push_back(row_ids == nullptr ? table.range_begin + chunk.first + i
                                                 : row_ids[i]);
  }
  result->damaged.push_back(std::move(damaged));
}

}  // namespace

RestoreResult restore_segment(const std::string& path, bool direct_io,
                              const std::vector<RestoreTable>& tables,
                              const std::vector<Chunk>& chunks, SlotPool& slots,
                              ThreadPool* threads) {
  RestoreResult result;
  result.rows_restored.assign(tables.size(), 0);
  std::unique_ptr<SegmentReader> reader;
  try {
    reader = std::make_unique<SegmentReader>(path, direct_io);
  } catch (const StorageError& error) {
    for (const Chunk& chunk : chunks) {
      DamagedChunk damaged{chunk.table, chunk.first, chunk.count, error.what(), false, {}};
      result.damaged.push_back(std::move(damaged));
    }
    return result;
  }
  Handover handover;
  std::thread reading([&] {
    try {
      for (const Chunk& chunk : chunks) {
        handover.push(read_chunk(*reader, tables[chunk.table].table, chunk, slots));
      }
      handover.end(nullptr);
    } catch (...) {
      handover.end(std::current_exception());
    }
  });
  // The reader waits only for slots, and each turn of this loop returns one, so it always ends.
  std::exception_ptr error;
  for (;;) {
    try {
      std::optional<ReadChunk> read = handover.pop();
      if (!read) break;
      if (!error) {
        const RestoreTable& wanted = tables[read->chunk->table];
        take_in(wanted, std::move(*read), threads, &result);
      }
    } catch (...) {
      if (error) break;
      error = std::current_exception();
    }
  }
  reading.join();
  if (error) std::rethrow_exception(error);
  for (const RestoreTable& wanted : tables) {
    for (const SegmentArray& array : wanted.table.arrays) {
      if (array.rows.stager != nullptr) array.rows.stager->finish();
    }
  }
  return result;
}

}  // namespace cpr_ext
