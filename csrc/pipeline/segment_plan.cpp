#include "pipeline/segment_plan.h"

#include <algorithm>
#include <cassert>
#include <limits>
#include <numeric>

#include "core/error.h"

namespace cpr_ext {

namespace {

std::string of_table(const SegmentTable& table, const std::string& what) {
  return "table '" + table.name + "', " + what + ": ";
}

}  // namespace

void check_table(const SegmentTable& table) {
  if (table.block_bytes != kAlignment && table.block_bytes != kSmallBlock) {
    throw UsageError("table '" + table.name + "': block_bytes is " +
                     std::to_string(table.block_bytes) + "; it must be " +
                     std::to_string(kSmallBlock) + " or " + std::to_string(kAlignment));
  }
  if (table.num_rows < 0 || table.range_begin < 0 ||
      table.num_rows > std::numeric_limits<int64_t>::max() - table.range_begin) {
    throw UsageError("table '" + table.name + "': " + std::to_string(table.num_rows) +
                     " rows from row " + std::to_string(table.range_begin) +
                     "; neither may be negative");
  }
  int64_t bytes_left = kMaxSegmentBytes;
  const auto take = [&](const std::string& what, int64_t offset, int64_t file_row_bytes) {
    if (offset < 0 || offset % table.block_bytes != 0) {
      throw UsageError(of_table(table, what) + "file offset " + std::to_string(offset) +
                       " is not a multiple of " + std::to_string(table.block_bytes));
    }
    if (offset > kMaxSegmentBytes || table.num_rows > bytes_left / file_row_bytes) {
      throw UsageError(of_table(table, what) + std::to_string(table.num_rows) + " rows of " +
                       std::to_string(file_row_bytes) + " bytes at " + std::to_string(offset) +
                       " are more than a segment can hold");
    }
    bytes_left -= table.num_rows * file_row_bytes;
  };
  if (table.row_ids_offset != -1) take("row_ids", table.row_ids_offset, kRowIdBytes);
  for (const SegmentArray& array : table.arrays) {
    take(array.name, array.file_offset, array.file_row_bytes());
  }
}

void check_layout(const std::vector<SegmentTable>& tables, int64_t header_bytes,
                  int64_t file_bytes) {
  struct Extent {
    int64_t begin;
    int64_t end;
    const SegmentTable* table;
  };
  std::vector<Extent> extents;
  for (const SegmentTable& table : tables) {
    for (const Piece& piece : chunk_pieces(table, 0, table.num_rows)) {
      const int64_t end = piece.file_offset + piece.size_bytes;
      if (piece.file_offset < header_bytes || end > file_bytes) {
        throw UsageError("table '" + table.name + "': bytes " + std::to_string(piece.file_offset) +
                         " to " + std::to_string(end) + " lie outside the planned file of " +
                         std::to_string(file_bytes) + " bytes with a header of " +
                         std::to_string(header_bytes));
      }
      if (piece.size_bytes > 0) extents.push_back({piece.file_offset, end, &table});
    }
  }
  std::sort(extents.begin(), extents.end(),
            [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
  for (size_t i = 1; i < extents.size(); ++i) {
    if (extents[i].begin >= extents[i - 1].end) continue;
    throw UsageError("tables '" + extents[i - 1].table->name + "' and '" + extents[i].table->name +
                     "' overlap in the file at byte " + std::to_string(extents[i].begin));
  }
}

void check_chunk(const SegmentTable& table, const Chunk& chunk, int64_t slot_bytes) {
  const auto refuse = [&](const std::string& why) {
    throw UsageError("table '" + table.name + "': the chunk of " + std::to_string(chunk.count) +
                     " rows at " + std::to_string(chunk.first) + " " + why);
  };
  if (chunk.first < 0 || chunk.count < 1 || chunk.count > table.num_rows - chunk.first) {
    refuse("lies outside the table's " + std::to_string(table.num_rows) + " rows");
  }
  const std::vector<Piece> pieces = chunk_pieces(table, chunk.first, chunk.count);
  for (const Piece& piece : pieces) {
    if (piece.file_offset % table.block_bytes != 0) refuse("is not aligned in the file");
  }
  if (chunk.checksums.size() != pieces.size()) {
    refuse("has " + std::to_string(chunk.checksums.size()) + " checksums for " +
           std::to_string(pieces.size()) + " pieces");
  }
  int64_t bytes = 0;
  for (const Piece& piece : pieces) bytes += piece.bytes_in_memory();
  if (bytes > slot_bytes) {
    refuse("has " + std::to_string(bytes) + " bytes, more than the staging slot's " +
           std::to_string(slot_bytes));
  }
}

std::vector<Piece> chunk_pieces(const SegmentTable& table, int64_t first, int64_t count) {
  std::vector<Piece> pieces;
  const auto add = [&](int64_t offset, int64_t file_row_bytes) {
    pieces.push_back(
        {offset + first * file_row_bytes, align_up(count * file_row_bytes, table.block_bytes)});
  };
  if (!table.is_range()) add(table.row_ids_offset, kRowIdBytes);
  for (const SegmentArray& array : table.arrays) add(array.file_offset, array.file_row_bytes());
  return pieces;
}

int64_t row_ids_bytes(const SegmentTable& table, int64_t count) {
  return table.is_range() ? 0 : align_up(count * kRowIdBytes);
}

int64_t chunk_bytes(const SegmentTable& table, int64_t count) {
  int64_t total = row_ids_bytes(table, count);
  for (const SegmentArray& array : table.arrays) total += align_up(count * array.file_row_bytes());
  return total;
}

int64_t rows_per_chunk(const SegmentTable& table, int64_t slot_bytes, int64_t max_chunk_bytes) {
  // A run of `unit` rows is a whole number of kAlignment in every array, in the slot and the file.
  int64_t unit = 1;
  int64_t bytes_per_row = 0;
  const auto add = [&](int64_t file_row_bytes) {
    unit = std::max(unit, kAlignment / std::gcd(kAlignment, file_row_bytes));
    bytes_per_row += file_row_bytes;
  };
  if (!table.is_range()) add(kRowIdBytes);
  for (const SegmentArray& array : table.arrays) add(array.file_row_bytes());
  if (table.num_rows <= unit && chunk_bytes(table, table.num_rows) <= slot_bytes) {
    return std::max<int64_t>(1, table.num_rows);
  }
  if (bytes_per_row == 0) {
    throw UsageError("table '" + table.name + "' has rows but no arrays");
  }
  const int64_t units = slot_bytes / (unit * bytes_per_row);
  if (units == 0) {
    throw UsageError("table '" + table.name + "': " + std::to_string(unit) + " rows of " +
                     std::to_string(bytes_per_row) + " bytes do not fit into a staging slot of " +
                     std::to_string(slot_bytes) + " bytes; make slot_bytes at least " +
                     std::to_string(unit * bytes_per_row));
  }
  if (max_chunk_bytes <= 0) return units * unit;
  return std::clamp<int64_t>(max_chunk_bytes / (unit * bytes_per_row), 1, units) * unit;
}

}  // namespace cpr_ext
