#include "pipeline/segment_restore.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <utility>

#include "core/error.h"
#include "staging/device_stager.h"
#include "staging/row_copy.h"
#include "staging/row_rounding.h"
#include "storage/segment_file.h"

namespace cpr_ext {

namespace {

// While one waits to be scheduled, or opens the next file, the disk has the other's request.
constexpr int kReaders = 2;

// One chunk, its checksums not yet compared.
struct ReadChunk {
  const RestoreSource* source = nullptr;
  const Chunk* chunk = nullptr;
  std::shared_ptr<const SlotLease> slot;  // of several chunks, if they are small
  const std::byte* data = nullptr;        // in the slot
  std::vector<std::string> damage;        // per piece, empty if it could be read
  int64_t bytes = 0;
};

// Reads all chunks of all sources, and gives them out in their order. Bounded by the slots.
class ReadAhead {
 public:
  // REQUIRES: all that is passed lives longer.
  ReadAhead(const std::vector<RestoreSource>& sources, bool direct_io, SlotPool& slots,
            const std::vector<double>& pauses_seconds);
  // Reads no more. A slot that a reader waits for comes from those that were read.
  ~ReadAhead();

  // The next chunk; nothing after the last. Throws what a reader threw.
  std::optional<ReadChunk> next();

 private:
  struct WantedChunk {
    const RestoreSource* source;
    const Chunk* chunk;
    int64_t slot_bytes;
  };
  struct OpenFile;
  void run();
  size_t end_of_run(size_t begin) const;
  ReadChunk read_chunk(const WantedChunk& wanted, std::byte* data, OpenFile* file);
  std::string read_piece(const Piece& piece, std::byte* data, OpenFile* file);
  void open(OpenFile* file) const;
  bool pause(double seconds);

  const bool direct_io_;
  SlotPool& slots_;
  const std::vector<double>& pauses_seconds_;
  std::vector<WantedChunk> chunks_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::condition_variable stopped_;
  std::map<size_t, ReadChunk> read_;  // guarded by mutex_, as all below
  size_t next_to_read_ = 0;
  size_t next_to_give_ = 0;
  bool is_stopped_ = false;
  std::exception_ptr error_;
  std::vector<std::thread> threads_;  // last: they use all above
};

// A reader's own, so that no two threads share a file.
struct ReadAhead::OpenFile {
  const RestoreSource* source = nullptr;
  std::optional<SegmentReader> reader;
  std::string damage;  // there is no such regular file
};

ReadAhead::ReadAhead(const std::vector<RestoreSource>& sources, bool direct_io, SlotPool& slots,
                     const std::vector<double>& pauses_seconds)
    : direct_io_(direct_io), slots_(slots), pauses_seconds_(pauses_seconds) {
  for (const RestoreSource& source : sources) {
    for (const Chunk& chunk : source.chunks) {
      const SegmentTable& table = source.tables[chunk.table].table;
      chunks_.push_back({&source, &chunk, chunk_bytes(table, chunk.count)});
    }
  }
  const size_t num_readers =
      std::min<size_t>({kReaders, chunks_.size(), static_cast<size_t>(slots.num_slots())});
  try {
    while (threads_.size() < num_readers) threads_.emplace_back([this] { run(); });
  } catch (...) {
    if (threads_.empty()) throw;  // else fewer do it too
  }
}

ReadAhead::~ReadAhead() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    next_to_read_ = chunks_.size();
    read_.clear();
    is_stopped_ = true;
  }
  stopped_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

std::optional<ReadChunk> ReadAhead::next() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (next_to_give_ == chunks_.size()) return std::nullopt;
  changed_.wait(lock, [&] { return error_ || read_.count(next_to_give_) > 0; });
  if (error_) std::rethrow_exception(error_);
  return std::move(read_.extract(next_to_give_++).mapped());
}

void ReadAhead::run() {
  try {
    OpenFile file;
    for (;;) {
      SlotLease slot = slots_.acquire();  // first, so that who reads the next to be given has one
      size_t begin, end;
      {
        std::lock_guard<std::mutex> lock(mutex_);
        if (next_to_read_ == chunks_.size()) return;
        begin = next_to_read_;
        end = next_to_read_ = end_of_run(begin);
      }
      std::byte* data = slot.data();
      const auto shared = std::make_shared<const SlotLease>(std::move(slot));
      std::vector<ReadChunk> read;
      for (size_t i = begin; i < end; ++i) {
        read.push_back(read_chunk(chunks_[i], data, &file));
        read.back().slot = shared;
        data += chunks_[i].slot_bytes;
      }
      std::lock_guard<std::mutex> lock(mutex_);
      if (is_stopped_) return;
      for (size_t i = begin; i < end; ++i) read_.emplace(i, std::move(read[i - begin]));
      changed_.notify_one();
    }
  } catch (...) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!error_) error_ = std::current_exception();
    changed_.notify_one();
  }
}

// A slot has room for many small chunks: to hand each over takes longer than to read it.
size_t ReadAhead::end_of_run(size_t begin) const {
  int64_t left = slots_.slot_bytes() - chunks_[begin].slot_bytes;
  size_t end = begin + 1;
  while (end < chunks_.size() && chunks_[end].source == chunks_[begin].source &&
         chunks_[end].slot_bytes <= left) {
    left -= chunks_[end++].slot_bytes;
  }
  return end;
}

ReadChunk ReadAhead::read_chunk(const WantedChunk& wanted, std::byte* data, OpenFile* file) {
  if (file->source != wanted.source) {
    *file = OpenFile{};
    file->source = wanted.source;
  }
  const Chunk& chunk = *wanted.chunk;
  const SegmentTable& table = wanted.source->tables[chunk.table].table;
  ReadChunk read{wanted.source, &chunk, nullptr, data, {}, 0};
  for (const Piece& piece : chunk_pieces(table, chunk.first, chunk.count)) {
    read.damage.push_back(read_piece(piece, data, file));
    if (file->reader) read.bytes += piece.size_bytes;
    data += piece.bytes_in_memory();
  }
  return read;
}

// What is damaged about the piece, or an empty string. What the system refuses is tried again, and
// then throws StorageError.
std::string ReadAhead::read_piece(const Piece& piece, std::byte* data, OpenFile* file) {
  for (size_t attempt = 0;; ++attempt) {
    try {
      if (!file->reader && file->damage.empty()) open(file);
      return file->reader ? file->reader->read(piece, data) : file->damage;
    } catch (const StorageError&) {
      file->reader.reset();  // a stale handle is opened again by its name
      if (attempt == pauses_seconds_.size() || !pause(pauses_seconds_[attempt])) throw;
    }
  }
}

void ReadAhead::open(OpenFile* file) const {
  try {
    // A chunk of the source is read, so it has tables.
    const bool in_blocks = file->source->tables.front().table.block_bytes == kAlignment;
    file->reader.emplace(file->source->path, direct_io_ && in_blocks);
  } catch (const StorageError& error) {
    if (!SegmentReader::is_missing(error)) throw;
    file->damage = error.what();
  }
}

// False if the reading ended meanwhile.
bool ReadAhead::pause(double seconds) {
  std::unique_lock<std::mutex> lock(mutex_);
  return !stopped_.wait_for(lock, std::chrono::duration<double>(seconds),
                            [&] { return is_stopped_; });
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

// What devices still read of a chunk's slot. Destroyed, it waits.
using Arrivals = std::vector<std::unique_ptr<Arrival>>;

// Scatters the wanted rows of an undamaged chunk. Devices may still read `row_ids` and `data` until
// `arrivals` are there.
void scatter_chunk(const SegmentTable& table, const Chunk& chunk, const int64_t* row_ids, Run run,
                   const std::byte* data, ThreadPool* threads, Arrivals* arrivals) {
  const std::byte* const begin = data;
  std::map<DeviceStager*, std::vector<StagedArray>> on_devices;
  for (const SegmentArray& array : table.arrays) {
    const std::byte* packed = data + run.begin * array.file_row_bytes();
    const int64_t count = run.end - run.begin;
    const RowsOf rows{&array.rows, row_ids == nullptr ? nullptr : row_ids + run.begin,
                      table.range_begin + chunk.first + run.begin, count};
    if (array.rows.stager != nullptr) {
      on_devices[array.rows.stager].push_back({array.rows, packed - begin, array.precision});
    } else if (array.is_rounded()) {
      scatter_rounded(packed, array.precision, rows, threads);
    } else if (row_ids == nullptr) {
      scatter_range(packed, table.range_begin + chunk.first + run.begin, count, array.rows,
                    threads);
    } else {
      scatter_rows(packed, row_ids + run.begin, count, array.rows, threads);
    }
    data += align_up(chunk.count * array.file_row_bytes());
  }
  const StagedRows rows{row_ids == nullptr ? nullptr : row_ids + run.begin,
                        table.range_begin + chunk.first + run.begin, run.end - run.begin};
  for (const auto& [stager, arrays] : on_devices) {
    arrivals->push_back(stager->scatter(arrays, rows, begin));
  }
}

// What is wrong with a chunk, or an empty string, and whether its first piece, the row ids, is
// good.
struct Verdict {
  std::string damage;
  bool first_is_good;
};

Verdict check_pieces(const SegmentTable& table, const ReadChunk& read) {
  const std::vector<Piece> pieces = chunk_pieces(table, read.chunk->first, read.chunk->count);
  Verdict verdict{"", false};
  const std::byte* data = read.data;
  for (size_t i = 0; i < pieces.size(); ++i) {
    std::string damage = read.damage[i];
    if (damage.empty()) damage = SegmentReader::check(pieces[i], read.chunk->checksums[i], data);
    if (i == 0) verdict.first_is_good = damage.empty();
    if (verdict.damage.empty()) verdict.damage = std::move(damage);
    data += pieces[i].bytes_in_memory();
  }
  return verdict;
}

// Returns what has to arrive before the chunk's slot is used again.
Arrivals take_in(const RestoreTable& wanted, const ReadChunk& read, ThreadPool* threads,
                 RestoreResult* result) {
  const SegmentTable& table = wanted.table;
  const Chunk& chunk = *read.chunk;
  Verdict verdict = check_pieces(table, read);
  const std::byte* data = read.data;
  const int64_t* row_ids = nullptr;
  bool rows_known = table.is_range();
  if (!table.is_range()) {
    row_ids = reinterpret_cast<const int64_t*>(data);
    data += row_ids_bytes(table, chunk.count);
    if (verdict.first_is_good) {
      const std::string damage = check_row_ids(wanted, row_ids, chunk);
      rows_known = damage.empty();
      if (verdict.damage.empty()) verdict.damage = damage;
    }
  }
  result->bytes_read += read.bytes;
  const Run run = rows_known ? wanted_run(wanted, row_ids, chunk) : Run{0, 0};
  if (verdict.damage.empty()) {
    result->rows_restored[chunk.table] += run.end - run.begin;
    Arrivals arrivals;
    scatter_chunk(table, chunk, row_ids, run, data, threads, &arrivals);
    return arrivals;
  }
  DamagedChunk damaged{chunk.table, chunk.first, chunk.count, verdict.damage, rows_known, {}};
  for (int64_t i = run.begin; i < run.end; ++i) {
    damaged.row_ids.push_back(row_ids == nullptr ? table.range_begin + chunk.first + i
                                                 : row_ids[i]);
  }
  result->damaged.push_back(std::move(damaged));
  return {};
}

std::set<DeviceStager*> stagers_of(const std::vector<RestoreSource>& sources) {
  std::set<DeviceStager*> stagers;
  for (const RestoreSource& source : sources) {
    for (const RestoreTable& wanted : source.tables) {
      for (const SegmentArray& array : wanted.table.arrays) stagers.insert(array.rows.stager);
    }
  }
  stagers.erase(nullptr);
  return stagers;
}

// Slots from which devices copy, oldest first.
class SlotsInUse {
 public:
  explicit SlotsInUse(const SlotPool& slots)
      : most_(static_cast<size_t>(slots.num_slots() / 2)) {}  // readers need some, too

  // Waits for the oldest until few enough are left; throws CudaError.
  void add(std::shared_ptr<const SlotLease> slot, Arrivals arrivals) {
    if (arrivals.empty()) return;
    slots_.push_back({std::move(slot), std::move(arrivals)});
    while (slots_.size() > most_) {
      for (const auto& arrival : slots_.front().arrivals) arrival->wait();
      slots_.pop_front();
    }
  }

 private:
  struct InUse {
    std::shared_ptr<const SlotLease> slot;
    Arrivals arrivals;  // destroyed first, which waits
  };

  const size_t most_;
  std::deque<InUse> slots_;
};

// Without memory that can be pinned all is restored nevertheless, only slower.
void pin_if_possible(SlotPool& slots, DeviceStager* stager, std::optional<PinnedSlots>* pinned) {
  try {
    pinned->emplace(slots, stager);
  } catch (const CudaError&) {
  }
}

}  // namespace

std::vector<RestoreResult> restore_segments(const std::vector<RestoreSource>& sources,
                                            bool direct_io, SlotPool& slots, ThreadPool* threads,
                                            const std::function<void(int64_t)>& poll,
                                            const std::vector<double>& pauses_seconds) {
  std::vector<RestoreResult> results(sources.size());
  for (size_t i = 0; i < sources.size(); ++i) {
    results[i].rows_restored.assign(sources[i].tables.size(), 0);
  }
  const std::set<DeviceStager*> stagers = stagers_of(sources);
  std::optional<PinnedSlots> pinned;
  if (!stagers.empty()) pin_if_possible(slots, *stagers.begin(), &pinned);
  SlotsInUse in_use(slots);
  ReadAhead read_ahead(sources, direct_io, slots, pauses_seconds);
  int64_t bytes_read = 0;
  while (std::optional<ReadChunk> read = read_ahead.next()) {
    const RestoreSource& source = *read->source;
    bytes_read += read->bytes;
    Arrivals arrivals = take_in(source.tables[read->chunk->table], *read, threads,
                                &results[&source - sources.data()]);
    in_use.add(std::move(read->slot), std::move(arrivals));
    if (poll) poll(bytes_read);
  }
  for (DeviceStager* stager : stagers) stager->finish();  // throws what has not arrived
  return results;
}

}  // namespace cpr_ext
