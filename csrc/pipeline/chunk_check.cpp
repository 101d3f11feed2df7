#include "pipeline/chunk_check.h"

#include <algorithm>
#include <string>

#include "core/crc32c.h"
#include "core/error.h"
#include "staging/find_nan.h"
#include "staging/row_rounding.h"

namespace cpr_ext {

namespace {

// Each block is searched and summed while it is in the second-level cache.
constexpr int64_t kBlockBytes = 256 * 1024;

// position: in the segment's rows of the table.
[[noreturn]] void refuse_row(const SegmentTable& table, const int64_t* row_ids,
                             const SegmentArray& array, int64_t position) {
  const int64_t row_id = row_ids == nullptr ? table.range_begin + position : row_ids[position];
  // Else bytes of a dense tensor.
  const bool is_row = array.file_row_bytes() >= item_size(array.rows.dtype);
  throw NanError("table '" + table.name + "', " +
                 (is_row ? "row " + std::to_string(row_id)
                         : "element " + std::to_string(position / item_size(array.rows.dtype))) +
                 ": " + array.name + (array.is_rounded() ? " is NaN or infinite" : " is NaN") +
                 "; the snapshot is given up and earlier ones are kept. " +
                 "Look for divergence, or save NaN rows with on_nan=\"save\"");
}

[[noreturn]] void refuse(const SegmentTable& table, const int64_t* row_ids, const Chunk& chunk,
                         const SegmentArray& array, int64_t element) {
  const int64_t byte = element * item_size(array.rows.dtype);
  refuse_row(table, row_ids, array, chunk.first + byte / array.file_row_bytes());
}

// The checksum of `padded_bytes`, of which elements of `dtype` fill `bytes`; the position of the
// first that is NaN in `nan`, if it is asked for.
uint32_t check_bytes(const std::byte* data, int64_t padded_bytes, int64_t bytes, DType dtype,
                     int64_t* nan) {
  uint32_t crc = 0;
  for (int64_t begin = 0; begin < padded_bytes; begin += kBlockBytes) {
    const int64_t size = std::min(kBlockBytes, padded_bytes - begin);
    if (nan != nullptr && *nan < 0 && begin < bytes) {
      const int64_t item_bytes = item_size(dtype);
      const int64_t count = std::min(size, bytes - begin) / item_bytes;
      const int64_t at = find_nan(dtype, data + begin, count);
      if (at >= 0) *nan = begin / item_bytes + at;
    }
    crc = crc32c_extend(crc, data + begin, static_cast<size_t>(size));
  }
  return crc;
}

}  // namespace

std::vector<uint32_t> check_captured(const SegmentTable& table, const int64_t* row_ids,
                                     const Chunk& chunk, const std::byte* data, bool refuse_nan) {
  std::vector<uint32_t> checksums;
  const auto pieces = chunk_pieces(table, chunk.first, chunk.count);
  auto piece = pieces.begin();
  if (row_ids != nullptr) {
    checksums.push_back(check_bytes(data, piece->size_bytes, 0, DType::kInt64, nullptr));
    data += piece++->bytes_in_memory();
  }
  for (const SegmentArray& array : table.arrays) {
    const bool look = refuse_nan && item_size(array.rows.dtype) > 0 && !array.is_rounded();
    if (refuse_nan && array.is_rounded()) {
      const int64_t row = find_nan_row(
          data, array.precision, array.rows.row_bytes / item_size(array.rows.dtype), chunk.count);
      if (row >= 0) refuse_row(table, row_ids, array, chunk.first + row);
    }
    int64_t nan = -1;
    checksums.push_back(check_bytes(data, piece->size_bytes, chunk.count * array.file_row_bytes(),
                                    array.rows.dtype, look ? &nan : nullptr));
    if (nan >= 0) refuse(table, row_ids, chunk, array, nan);
    data += piece++->bytes_in_memory();
  }
  return checksums;
}

}  // namespace cpr_ext
