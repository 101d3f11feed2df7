#include "selection/nonzero_rows.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace cpr_ext {

namespace {

// Rows are looked at one by one only in blocks that are not zero as a whole.
constexpr int64_t kBlockBytes = 4096;
constexpr int64_t kTaskBytes = 1 << 20;

bool is_zero(const std::byte* data, int64_t num_bytes) {
  constexpr int64_t kWord = sizeof(uint64_t);
  uint64_t any = 0;
  int64_t at = 0;
  for (; at + kWord <= num_bytes; at += kWord) {
    uint64_t word;
    std::memcpy(&word, data + at, kWord);
    any |= word;
  }
  for (; at < num_bytes; ++at) any |= std::to_integer<uint64_t>(data[at]);
  return any == 0;
}

void collect(const std::byte* data, int64_t row_bytes, int64_t begin, int64_t end,
             RowIdVector& found) {
  const int64_t block_rows = std::max<int64_t>(1, kBlockBytes / row_bytes);
  for (int64_t first = begin; first < end; first += block_rows) {
    const int64_t last = std::min(end, first + block_rows);
    if (is_zero(data + first * row_bytes, (last - first) * row_bytes)) continue;
    for (int64_t row = first; row < last; ++row) {
      if (!is_zero(data + row * row_bytes, row_bytes)) found.push_back(row);
    }
  }
}

}  // namespace

RowIdVector nonzero_rows(const std::byte* data, int64_t num_rows, int64_t row_bytes,
                         ThreadPool* pool) {
  RowIdVector row_ids;
  if (num_rows == 0 || row_bytes == 0) return row_ids;
  const int64_t task_rows = std::max<int64_t>(1, kTaskBytes / row_bytes);
  const int64_t num_tasks = (num_rows + task_rows - 1) / task_rows;
  if (pool == nullptr || num_tasks == 1) {
    collect(data, row_bytes, 0, num_rows, row_ids);
    return row_ids;
  }
  std::vector<RowIdVector> parts(static_cast<size_t>(num_tasks));
  pool->parallel_for(num_tasks, [&](int64_t task) {
    const int64_t begin = task * task_rows;
    collect(data, row_bytes, begin, std::min(num_rows, begin + task_rows),
            parts[static_cast<size_t>(task)]);
  });
  for (const RowIdVector& part : parts) row_ids.insert(row_ids.end(), part.begin(), part.end());
  return row_ids;
}

}  // namespace cpr_ext
