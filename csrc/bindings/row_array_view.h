// A tensor whose first dimension is rows, as the staging room sees it.
#pragma once

#include <pybind11/pybind11.h>

#include "core/device_stream.h"
#include "staging/row_array.h"

namespace cpr_ext {

// Raises UsageError naming `name` unless `tensor` is (num_rows, ...) with contiguous rows that do
// not overlap, in the memory of `device`. The view holds no reference: the caller keeps `tensor`
// alive.
RowArray view_rows(pybind11::handle tensor, const char* name, int64_t first_row_id,
                   int device = kHostMemory);

}  // namespace cpr_ext
