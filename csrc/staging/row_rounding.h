// Float32 rows rounded to fewer bits, and back. `python_tests/rounding.py` is the specification
// and has the bound, which holds for every row: each has its own scale.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/thread_pool.h"
#include "staging/row_array.h"
#include "staging/row_precision.h"

namespace cpr_ext {

// Rows as they are gathered: `count` of `source`, those of `row_ids`, or, if it is null, from
// `first_row_id` on.
struct RowsOf {
  const RowArray* array;
  const int64_t* row_ids;
  int64_t first_row_id;
  int64_t count;

  std::byte* row(int64_t i) const {
    return array->row(row_ids == nullptr ? first_row_id + i : row_ids[i]);
  }
};

// Packs rows into out (count, stored_row_bytes), rounded.
// REQUIRES: float32 rows that the array holds; precision is not kExact; `threads` may be null.
void gather_rounded(const RowsOf& rows, RowPrecision precision, std::byte* out,
                    ThreadPool* threads);

// Writes rounded rows (count, stored_row_bytes) to their places, as float32.
// REQUIRES: as gather_rounded; rows distinct.
void scatter_rounded(const std::byte* stored, RowPrecision precision, const RowsOf& rows,
                     ThreadPool* threads);

// Position of the first of `count` stored rows that is NaN, as it had no range; -1 if none.
int64_t find_nan_row(const std::byte* stored, RowPrecision precision, int64_t elements,
                     int64_t count);

}  // namespace cpr_ext
