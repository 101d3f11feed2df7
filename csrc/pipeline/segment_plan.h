// The position of a segment's rows: in memory, in a staging slot, and in the file. The Python layer
// makes it from the segment's header (docs/snapshot_format.md); captures and restores use it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "staging/row_array.h"
#include "staging/row_precision.h"
#include "storage/segment_file.h"

namespace cpr_ext {

// No segment is larger, so that no sum of offsets and sizes overflows.
constexpr int64_t kMaxSegmentBytes = int64_t{1} << 50;

constexpr int64_t kRowIdBytes = sizeof(int64_t);  // in a slot and in the file

// The weight or a per-row state of one table.
struct SegmentArray {
  std::string name;
  RowArray rows;                                  // source of a capture, target of a restore
  int64_t file_offset = 0;                        // of the packed rows, a whole number of blocks
  RowPrecision precision = RowPrecision::kExact;  // in the file; float32 rows if it is not kExact

  bool is_rounded() const { return precision != RowPrecision::kExact; }

  // Bytes of a row in the file, and in a staging slot, which holds what the file will; those in
  // memory are rows.row_bytes.
  int64_t file_row_bytes() const {
    return is_rounded() ? stored_row_bytes(precision, rows.row_bytes / 4) : rows.row_bytes;
  }
};

// The rows of one table that a segment holds, in ascending order of row id.
struct SegmentTable {
  std::string name;
  int64_t num_rows = 0;
  int64_t row_ids_offset =
      -1;                   // file offset of the int64 row ids; -1: a range of rows, no ids kept
  int64_t range_begin = 0;  // first row id of a range
  int64_t block_bytes = kAlignment;  // of the segment: what lies in the file is a multiple of it
  bool is_packed = false;            // memory holds copies of these rows alone, in order
  std::vector<SegmentArray> arrays;

  bool is_range() const { return row_ids_offset < 0; }
};

// Rows [first, first + count) of a table in a segment: captured at one step, read back as one.
struct Chunk {
  int table = 0;
  int64_t first = 0;
  int64_t count = 0;
  int64_t step = 0;
  std::vector<uint32_t> checksums;  // of its pieces, in their order
};

// The checks below face numbers that come from files. They throw UsageError, naming the table.

// Counts and offsets are such that every chunk of the table can be computed without overflow.
void check_table(const SegmentTable& table);

// No two arrays share bytes of the file, and all lie between its header and its end.
void check_layout(const std::vector<SegmentTable>& tables, int64_t header_bytes,
                  int64_t file_bytes);

// The chunk lies in the table, starts aligned, has its checksums and fits into a slot.
void check_chunk(const SegmentTable& table, const Chunk& chunk, int64_t slot_bytes);

// The pieces of a chunk, in the order in which they lie in a slot: row ids (unless a range), then
// each array. REQUIRES: first is such that every piece starts aligned.
std::vector<Piece> chunk_pieces(const SegmentTable& table, int64_t first, int64_t count);

// Bytes in a slot of the row ids of a chunk; 0: a range.
int64_t row_ids_bytes(const SegmentTable& table, int64_t count);

// Bytes in a slot of all pieces of a chunk together.
int64_t chunk_bytes(const SegmentTable& table, int64_t count);

// The most rows that fit into slot_bytes, and into max_chunk_bytes (0: no limit) as far as that is
// possible, and keep every chunk of the table aligned in the file. Throws UsageError, naming the
// table, if not even the smallest chunk fits into slot_bytes.
int64_t rows_per_chunk(const SegmentTable& table, int64_t slot_bytes, int64_t max_chunk_bytes = 0);

}  // namespace cpr_ext
