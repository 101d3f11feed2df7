// Restores the rows of segments: readers' threads read chunks ahead into slots, while the caller
// compares their checksums and scatters them into the tables. Devices copy from the slots
// meanwhile.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "core/thread_pool.h"
#include "pipeline/segment_plan.h"
#include "staging/slot_pool.h"

namespace cpr_ext {

// The rows of one table in a segment, and which of them are wanted.
struct RestoreTable {
  SegmentTable table;        // arrays' `rows` are the targets
  int64_t wanted_begin = 0;  // row ids outside [wanted_begin, wanted_end) are read but not written
  int64_t wanted_end = 0;
};

struct DamagedChunk {
  int table = 0;
  int64_t first = 0;  // position in the segment's rows of the table
  int64_t count = 0;
  std::string reason;
  bool row_ids_known = false;  // then row_ids are those of the wanted rows not restored
  std::vector<int64_t> row_ids;
};

struct RestoreResult {
  std::vector<int64_t> rows_restored;  // per table
  std::vector<DamagedChunk> damaged;   // none of their rows was written
  int64_t bytes_read = 0;
};

// A segment file, and what of it is to be read.
struct RestoreSource {
  std::string path;
  std::vector<RestoreTable> tables;
  std::vector<Chunk> chunks;
};

// Restores the wanted rows of all chunks, in their order, so of a row that is in several sources
// the last one's state stays. A chunk is written only if each of its pieces is undamaged, so a row
// is whole; damaged ones, also of a file that is missing, are reported. One result per source.
// Throws StorageError for what could not be read, after each pause once more; rows may be written
// then. `poll` (may be empty) gets the bytes read so far, between chunks; what it throws ends the
// restoration and is thrown. REQUIRES: every chunk fits a slot; pieces are aligned; `threads` may
// be null.
std::vector<RestoreResult> restore_segments(const std::vector<RestoreSource>& sources,
                                            bool direct_io, SlotPool& slots, ThreadPool* threads,
                                            const std::function<void(int64_t)>& poll = {},
                                            const std::vector<double>& pauses_seconds = {});

}  // namespace cpr_ext
