#include "pipeline/segment_plan.h"

#include <algorithm>
#include <numeric>

#include "core/error.h"

namespace cpr_ext {

namespace {
constexpr int64_t kRowIdBytes = 8;
}

std::vector<Piece> chunk_pieces(const SegmentTable& table, int64_t first, int64_t count) {
  std::vector<Piece> pieces;
  if (!table.is_range()) {
    pieces.push_back({table.row_ids_offset + first * kRowIdBytes, align_up(count * kRowIdBytes)});
  }
  for (const SegmentArray& array : table.arrays) {
    pieces.push_back(
        {array.file_offset + first * array.rows.row_bytes, align_up(count * array.rows.row_bytes)});
  }
  return pieces;
}

int64_t chunk_bytes(const SegmentTable& table, int64_t count) {
  int64_t total = 0;
  for (const Piece& piece : chunk_pieces(table, 0, count)) total += piece.size_bytes;
  return total;
}

int64_t rows_per_chunk(const SegmentTable& table, int64_t slot_bytes) {
  // A run of `unit` rows is a whole number of blocks in every array.
  int64_t unit = 1;
  int64_t bytes_per_row = 0;
  const auto add = [&](int64_t row_bytes) {
    unit = std::max(unit, kAlignment / std::gcd(kAlignment, row_bytes));
    bytes_per_row += row_bytes;
  };
  if (!table.is_range()) add(kRowIdBytes);
  for (const SegmentArray& array : table.arrays) add(array.rows.row_bytes);
  if (table.num_rows <= unit && chunk_bytes(table, table.num_rows) <= slot_bytes) {
    return std::max<int64_t>(1, table.num_rows);
  }
  const int64_t units = slot_bytes / (unit * bytes_per_row);
  if (units == 0) {
    throw UsageError("table '" + table.name + "': " + std::to_string(unit) + " rows of " +
                     std::to_string(bytes_per_row) + " bytes do not fit into a staging slot of " +
                     std::to_string(slot_bytes) + " bytes; make slot_bytes at least " +
                     std::to_string(unit * bytes_per_row));
  }
  return units * unit;
}

}  // namespace cpr_ext
