// Keeps a diverged model from replacing good rows: looks for NaN in staged bytes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/dtype.h"

namespace cpr_ext {

// The position, in elements, of the first NaN in data (num_elements,), or -1. Types that cannot
// hold NaN give -1.
int64_t find_nan(DType dtype, const std::byte* data, int64_t num_elements);

}  // namespace cpr_ext
