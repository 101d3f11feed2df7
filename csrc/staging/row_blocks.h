// How copies of rows are split among threads, and how far ahead they prefetch.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/thread_pool.h"

namespace cpr_ext {

constexpr int64_t kCacheLine = 64;
// Far enough ahead to hide a memory access. Of rows that lie side by side, the CPU itself requests
// those that come next.
constexpr int64_t kPrefetchBytes = 8192;
constexpr int64_t kPrefetchBytesOfRange = 4096;
// Below this, waking a thread costs more than it saves.
constexpr int64_t kBytesPerTask = 512 * 1024;

// How many rows ahead of the current one the row to be prefetched is; is_range: rows lie side by
// side.
inline int64_t rows_ahead(int64_t row_bytes, bool is_range = false) {
  const int64_t bytes = is_range ? kPrefetchBytesOfRange : kPrefetchBytes;
  return std::clamp<int64_t>(bytes / std::max<int64_t>(1, row_bytes), 2, 64);
}

// Requests the cache lines of a row that will be read or written soon, and waits for none. Into the
// second-level cache: more lines can be on their way to it at a time than to the first-level cache,
// and rows that are spread over a table arrive 1.3 to 1.7 times as fast (decision 59).
inline void prefetch_row(const std::byte* row, int64_t row_bytes) {
  for (int64_t at = 0; at < row_bytes; at += kCacheLine) __builtin_prefetch(row + at, 0, 2);
}

// Calls body(begin, end) for blocks of `count` rows of `row_bytes`, on the pool's threads if given.
template <typename Body>
void for_blocks(int64_t count, int64_t row_bytes, ThreadPool* pool, const Body& body) {
  const int64_t rows_per_task =
      std::max<int64_t>(1, kBytesPerTask / std::max<int64_t>(1, row_bytes));
  const int64_t num_tasks = (count + rows_per_task - 1) / rows_per_task;
  if (pool == nullptr || num_tasks <= 1) {
    if (count > 0) body(0, count);
    return;
  }
  pool->parallel_for(num_tasks, [&](int64_t task) {
    body(task * rows_per_task, std::min(count, (task + 1) * rows_per_task));
  });
}

}  // namespace cpr_ext
