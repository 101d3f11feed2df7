// Scores -> row ids: the best rows under a budget.
#pragma once

#include <cstdint>

#include "core/row_id_vector.h"
#include "core/thread_pool.h"

namespace cpr_ext {

// The `k` rows with the highest non-zero scores, ties by lowest row id; ascending row ids. Fewer
// than `k` if fewer are non-zero, none if k <= 0. Linear in num_rows; the same for any number of
// threads (pool may be nullptr). Beside the result it needs about 100 KiB per thread, and for large
// counts 4 bytes for each row near the threshold (see sampled_threshold.h).
//
// scores: (num_rows). float: UsageError for the first row whose score is NaN or negative.
RowIdVector top_rows(const uint32_t* scores, int64_t num_rows, int64_t k, ThreadPool* pool);
RowIdVector top_rows(const float* scores, int64_t num_rows, int64_t k, ThreadPool* pool);

}  // namespace cpr_ext
