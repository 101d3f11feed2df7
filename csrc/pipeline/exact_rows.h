// Rows of a chunk that broke the bound of their precision: kept as float32 after its other pieces.
// Those of a device lie there at first with room for all rows of the chunk, until it is known how
// many there are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "pipeline/segment_plan.h"

namespace cpr_ext {

// Rows of a chunk that were copied before they changed, and what became of their rounding.
struct OverlaidRows {
  uint8_t* broken;  // per row of the chunk
  // By position: the rows of the table's rounded arrays, of those that broke the bound.
  std::map<int64_t, std::vector<std::byte>> exact;
  float largest_error;
};

// Writes the exact rows of a chunk to `out`, see ExactRows; returns how many there are.
// row_at(array, i): row i of the chunk in memory, which may be in `out` with room for all rows. A
// row that was copied before it changed is taken from `overlaid`.
template <class RowAt>
int64_t gather_exact(const SegmentTable& table, const std::vector<uint8_t>& broken,
                     const OverlaidRows& overlaid, const RowAt& row_at, std::byte* out) {
  std::vector<int32_t> positions;
  const uint8_t* const begin = broken.data();
  const uint8_t* const end = begin + broken.size();
  for (const uint8_t* at = begin; at < end; ++at) {
    at = static_cast<const uint8_t*>(std::memchr(at, 1, end - at));
    if (at == nullptr) break;
    positions.push_back(static_cast<int32_t>(at - begin));
  }
  if (positions.empty()) return 0;
  std::memcpy(out, positions.data(), positions.size() * sizeof(int32_t));
  out += positions.size() * sizeof(int32_t);
  int64_t offset = 0;  // of an array in an overlaid row
  for (const SegmentArray& array : table.arrays) {
    if (!array.is_rounded()) continue;
    for (const int32_t position : positions) {
      const auto copied = overlaid.exact.find(position);
      const std::byte* row =
          copied == overlaid.exact.end() ? row_at(array, position) : copied->second.data() + offset;
      std::memmove(out, row, array.rows.row_bytes);
      out += array.rows.row_bytes;
    }
    offset += array.rows.row_bytes;
  }
  return static_cast<int64_t>(positions.size());
}

// Where a device writes, in the room of a chunk for exact rows: (count,) float32 of errors, see
// StagedRows, then each rounded array's rows at their positions. Offsets from `out`.
int64_t room_for_exact(const SegmentTable& table, int64_t count, const SegmentArray& array);

// Packs the exact rows of a chunk once a device has written them to `out`, and notes them and the
// largest error in the chunk.
void pack_exact(const SegmentTable& table, std::byte* out, Chunk* chunk);

// What is wrong with the exact rows of a chunk, read from a file, or an empty string.
std::string check_exact(const Chunk& chunk, const std::byte* data);

// Those of the exact rows whose position is in a range.
struct ExactRun {
  const int32_t* positions;  // (count,)
  int64_t count;
  // Of each rounded array, in their order: its rows.
  std::vector<std::pair<const SegmentArray*, const std::byte*>> rows;
};

// Those in [begin, end). REQUIRES: check_exact() has found nothing.
ExactRun exact_between(const SegmentTable& table, const Chunk& chunk, const std::byte* data,
                       int64_t begin, int64_t end);

}  // namespace cpr_ext
