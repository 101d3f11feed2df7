// How far a row has moved: the L2 norm of the difference of two rows.
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace cpr_ext {

// `now` and `before`: (embedding_dim) elements of a floating `dtype`, aligned to it. Summed in
// float32 (float64 for float64), in an order that depends on nothing but embedding_dim.
// Changes below about 1e-19 come out as none and above 1e19 as infinite, save for float64.
// NaN exactly if `now` holds NaN. Equal infinities count as unchanged; an infinity or NaN that was
// there before and is gone as an infinite change.
float row_change(DType dtype, const void* now, const void* before, int64_t embedding_dim);

}  // namespace cpr_ext
