#include "pipeline/exact_rows.h"

#include <algorithm>
#include <cmath>

namespace cpr_ext {

int64_t room_for_exact(const SegmentTable& table, int64_t count, const SegmentArray& array) {
  int64_t offset = count * static_cast<int64_t>(sizeof(float));
  for (const SegmentArray& each : table.arrays) {
    if (&each == &array) break;
    if (each.is_rounded()) offset += count * each.rows.row_bytes;
  }
  return offset;
}

void pack_exact(const SegmentTable& table, std::byte* out, Chunk* chunk) {
  std::vector<uint8_t> broken(chunk->count);
  const auto* errors = reinterpret_cast<const float*>(out);
  for (int64_t i = 0; i < chunk->count; ++i) {
    broken[i] = std::signbit(errors[i]);
    chunk->largest_error = std::max(chunk->largest_error, std::fabs(errors[i]));
  }
  const auto row_at = [&](const SegmentArray& array, int64_t i) {
    return out + room_for_exact(table, chunk->count, array) + i * array.rows.row_bytes;
  };
  chunk->exact.count = gather_exact(table, broken, {broken.data(), {}, 0}, row_at, out);
}

std::string check_exact(const Chunk& chunk, const std::byte* data) {
  const auto* positions = reinterpret_cast<const int32_t*>(data);
  int64_t previous = -1;
  for (int64_t i = 0; i < chunk.exact.count; ++i) {
    if (positions[i] <= previous || positions[i] >= chunk.count) {
      return "exact row " + std::to_string(positions[i]) + " is out of order or of its chunk";
    }
    previous = positions[i];
  }
  return "";
}

ExactRun exact_between(const SegmentTable& table, const Chunk& chunk, const std::byte* data,
                       int64_t begin, int64_t end) {
  const auto* all = reinterpret_cast<const int32_t*>(data);
  const int32_t* const first = std::lower_bound(all, all + chunk.exact.count, begin);
  const int32_t* const last = std::lower_bound(first, all + chunk.exact.count, end);
  ExactRun run{first, last - first, {}};
  data += chunk.exact.count * static_cast<int64_t>(sizeof(int32_t));
  for (const SegmentArray& array : table.arrays) {
    if (!array.is_rounded()) continue;
    run.rows.emplace_back(&array, data + (first - all) * array.rows.row_bytes);
    data += chunk.exact.count * array.rows.row_bytes;
  }
  return run;
}

}  // namespace cpr_ext
