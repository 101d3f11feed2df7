// Which rows of a table on a device are dirty, as the kernels of other rooms see it; for *.cu only.
#pragma once

#include <cstdint>

#include "core/cuda/bits.h"

namespace cpr_ext {

struct DirtyMarks {
  const uint32_t* words;
  bool are_counts;  // one a row; else one bit

  __device__ bool is_dirty(int64_t row) const {
    return are_counts ? words[row] != 0 : is_bit_set(words, row);
  }
};

}  // namespace cpr_ext
