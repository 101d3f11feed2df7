// Which rows of a dense gradient are not zero: the rows that its optimizer is about to change.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/row_id_vector.h"
#include "core/thread_pool.h"

namespace cpr_ext {

// The rows of data (num_rows, row_bytes) in which any bit is set, ascending; -0.0 counts as set.
// Reads at the memory's speed while most rows are zero. `pool`: nullptr for no other threads.
RowIdVector nonzero_rows(const std::byte* data, int64_t num_rows, int64_t row_bytes,
                         ThreadPool* pool);

}  // namespace cpr_ext
