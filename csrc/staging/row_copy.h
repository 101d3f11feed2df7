// Whole rows from a table into packed bytes (gather) and back (scatter).
#pragma once

#include "core/thread_pool.h"
#include "staging/row_array.h"

namespace cpr_ext {

// Packs the rows `row_ids` (count,) of `source` into out (count, row_bytes).
// REQUIRES: source.holds(row_id) for each; `out` does not overlap the source. `pool` may be null.
void gather_rows(const RowArray& source, const int64_t* row_ids, int64_t count, std::byte* out,
                 ThreadPool* pool);

// As gather_rows for the rows [first_row_id, first_row_id + count).
void gather_range(const RowArray& source, int64_t first_row_id, int64_t count, std::byte* out,
                  ThreadPool* pool);

// Writes packed rows (count, row_bytes) to the rows `row_ids` of `target`.
// REQUIRES: target.holds(row_id) for each; row_ids distinct, so that threads never share a row.
void scatter_rows(const std::byte* packed, const int64_t* row_ids, int64_t count,
                  const RowArray& target, ThreadPool* pool);

// As scatter_rows for the rows [first_row_id, first_row_id + count).
void scatter_range(const std::byte* packed, int64_t first_row_id, int64_t count,
                   const RowArray& target, ThreadPool* pool);

}  // namespace cpr_ext
