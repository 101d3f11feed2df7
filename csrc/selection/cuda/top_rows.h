// Scores on a device -> row ids: top_rows where the counts are.
#pragma once

#include <cstdint>

#include "core/row_id_vector.h"

namespace cpr_ext {

// As top_rows, of `scores` (num_rows,) in the memory of `device`, when its current stream gets
// here. Waits for that stream, which goes on while the rows are copied to the host.
// Throws CudaError, such as for want of memory: 8 bytes per row that may be chosen and 8 MiB.
RowIdVector device_top_rows(int device, const uint32_t* scores, int64_t num_rows, int64_t k);

}  // namespace cpr_ext
