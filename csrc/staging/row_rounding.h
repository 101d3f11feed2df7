// Float32 rows rounded to fewer bits, and back. `cpr_ext/state/precision.py` is the specification.
//
// A rounded value differs from its original by at most half a step of the row: (largest - smallest)
// / (2 * levels) for int8 and int4, half a unit in the last place of the largest magnitude for
// float16 and bfloat16. Each row is checked as it is rounded. One that breaks the bound (a tiny
// range, infinities, NaN) is not kept in these bits.
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

// Packs rows into out (count, stored_row_bytes), rounded. Where row i breaks the bound, broken[i]
// becomes 1 and its bytes are zeros; else broken[i] stays. Returns the largest |x - x'| of the
// others.
// REQUIRES: float32 rows that the array holds; precision is not kExact; `threads` may be null.
float gather_rounded(const RowsOf& rows, RowPrecision precision, std::byte* out, uint8_t* broken,
                     ThreadPool* threads);

// One row, as gather_rounded does it; false if it breaks the bound.
bool round_row(const float* row, int64_t elements, RowPrecision precision, std::byte* out,
               float* largest_error);

// Writes rounded rows (count, stored_row_bytes) to their places, as float32.
// REQUIRES: as gather_rounded; rows distinct.
void scatter_rounded(const std::byte* stored, RowPrecision precision, const RowsOf& rows,
                     ThreadPool* threads);

}  // namespace cpr_ext
