// How copies of rows are split among threads, and how far ahead they prefetch.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/thread_pool.h"

namespace cpr_ext {

// Far enough ahead to hide a memory access, near enough to stay in the first-level cache.
constexpr int64_t kPrefetchBytes = 4096;
constexpr int64_t kCacheLine = 64;
// Below this, waking a thread costs more than it saves.
constexpr int64_t kBytesPerTask = 512 * 1024;

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
