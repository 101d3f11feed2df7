// The position of a segment's rows: in memory, in a staging slot, and in the file. The Python layer
// makes it from the segment's header (docs/snapshot_format.md); captures and restores use it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/packed_row_ids.h"
#include "staging/row_array.h"
#include "staging/row_precision.h"
#include "storage/segment_writer.h"

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

// What a file holds of the row ids of a chunk, packed.
struct PackedRowIds {
  int64_t first = 0;  // position of the chunk's first row
  RowIdRun run;
  int64_t file_offset = 0;
};

// Rows of a chunk that broke the bound of their precision. They are kept as float32 in a piece of
// their own: (count,) int32 positions in the chunk, ascending, then the rows of each rounded array.
struct ExactRows {
  int64_t first = 0;  // position of the chunk's first row
  int64_t count = 0;
  int64_t file_offset = 0;
};

// Where a restore notes what it wrote to each row: one byte a row.
struct RowMarks {
  RowArray rows;         // without data: nothing is noted
  uint8_t of_row = 0;    // what it notes
  uint8_t of_exact = 0;  // the same of exact rows
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
  std::vector<PackedRowIds> packed_ids;  // of every chunk, ascending; none: 8 bytes an id
  std::vector<ExactRows> exact_rows;     // of a file to read: of chunks that have any, ascending
  RowMarks marks;

  bool is_range() const { return row_ids_offset < 0; }

  // Bytes of a row among a chunk's exact rows; 0: no array is rounded.
  int64_t exact_row_bytes() const;
};

// Rows [first, first + count) of a table in a segment: captured at one step, read back as one.
struct Chunk {
  int table = 0;
  int64_t first = 0;
  int64_t count = 0;
  int64_t step = 0;
  std::vector<uint32_t> checksums;  // of its pieces, in their order
  ExactRows exact;
  float largest_error = 0;  // no value of a rounded row differs by more
};

// The checks below face numbers that come from files. They throw UsageError, naming the table.

// Counts and offsets are such that every chunk of the table can be computed without overflow.
void check_table(const SegmentTable& table);

// No two arrays share bytes of the file, and all lie between its header and its end.
void check_layout(const std::vector<SegmentTable>& tables, int64_t header_bytes,
                  int64_t file_bytes);

// The chunk lies in the table, starts aligned, has its checksums and fits into a slot.
void check_chunk(const SegmentTable& table, const Chunk& chunk, int64_t slot_bytes);

// The pieces of a chunk, in the order in which they lie in a slot: row ids (unless a range), each
// array, and exact rows, if it has any. REQUIRES: first is such that every piece starts aligned;
// where row ids are packed, it is a chunk of the table.
std::vector<Piece> chunk_pieces(const SegmentTable& table, const Chunk& chunk);

// Of a chunk whose row ids are packed.
RowIdRun packed_run(const SegmentTable& table, int64_t first, int64_t count);

// Bytes in a slot of the first of them, the row ids. REQUIRES: they are stored.
int64_t row_ids_bytes(const SegmentTable& table, int64_t first, int64_t count);

// Bytes in a slot of those pieces together, without exact rows.
int64_t chunk_bytes(const SegmentTable& table, int64_t first, int64_t count);

// The most bytes that a chunk of so many rows takes in a slot, however many of them are exact.
int64_t most_chunk_bytes(const SegmentTable& table, int64_t count);

// The most rows that fit into slot_bytes, and into max_chunk_bytes (0: no limit) as far as that is
// possible, and keep every chunk of the table aligned in the file. Throws UsageError, naming the
// table, if not even the smallest chunk fits into slot_bytes.
int64_t rows_per_chunk(const SegmentTable& table, int64_t slot_bytes, int64_t max_chunk_bytes = 0);

}  // namespace cpr_ext
