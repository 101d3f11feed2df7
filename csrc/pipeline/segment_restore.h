// Brings the rows of one segment back: a reader's thread reads and checks chunks ahead into slots
// while the caller scatters them into the tables.
#pragma once

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

// Restores the wanted rows of all `chunks` from the file at `path`. A chunk is written only if each
// of its pieces is undamaged, so a row is whole; damaged ones, also a file that cannot be opened,
// are reported. REQUIRES: every chunk fits a slot; pieces are aligned; `threads` may be null.
RestoreResult restore_segment(const std::string& path, bool direct_io,
                              const std::vector<RestoreTable>& tables,
                              const std::vector<Chunk>& chunks, SlotPool& slots,
                              ThreadPool* threads);

}  // namespace cpr_ext
