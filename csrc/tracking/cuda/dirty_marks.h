// Which rows of a table on a device are dirty, as kernels see it, and one bit per row; for *.cu
// only.
#pragma once

#include <cstdint>

#include "core/cuda/bits.h"
#include "tracking/row_tracker.h"

namespace cpr_ext {

struct DirtyMarks {
  uint32_t* words;
  bool are_counts;  // one a row; else one bit

  __device__ bool is_dirty(int64_t row) const {
    return are_counts ? words[row] != 0 : is_bit_set(words, row);
  }
};

// Adds how many rows of a range are dirty to `sum` on the device, which is current.
void launch_count(const DirtyMarks& marks, RowRange range, unsigned long long* sum,
                  cudaStream_t stream);

class DeviceBitmap {
 public:
  // All clear when `stream` gets here. REQUIRES: the device is current.
  DeviceBitmap(int64_t num_rows, cudaStream_t stream);

  uint32_t* words() const { return words_.as<uint32_t>(); }
  int64_t num_bytes() const { return num_bytes_; }

 private:
  int64_t num_bytes_;
  DeviceMemory words_;
};

}  // namespace cpr_ext
