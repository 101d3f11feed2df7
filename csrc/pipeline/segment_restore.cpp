#include "pipeline/segment_restore.h"

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include "core/error.h"
#include "pipeline/read_ahead.h"
#include "staging/device_stager.h"
#include "staging/pinned_slots.h"
#include "staging/row_copy.h"
#include "staging/row_rounding.h"
#include "storage/segment_reader.h"

namespace cpr_ext {

namespace {

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
