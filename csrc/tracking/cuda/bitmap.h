// One bit per row in the memory of a device; for *.cu only.
#pragma once

#include <cstdint>

#include "core/cuda/bits.h"
#include "tracking/row_tracker.h"

namespace cpr_ext {

class DeviceBitmap {
 public:
  // All clear when `stream` gets here. REQUIRES: the device is current.
  DeviceBitmap(int64_t num_rows, cudaStream_t stream);

  uint32_t* words() const { return words_.as<uint32_t>(); }
  int64_t num_bytes() const { return num_bytes_; }

  // Adds how many are set to `sum` on the device, which is current.
  void launch_count(RowRange range, unsigned long long* sum, cudaStream_t stream) const;
  // Waits for the device's current stream.
  int64_t count(RowRange range, int device) const;

 private:
  int64_t num_bytes_;
  DeviceMemory words_;
};

}  // namespace cpr_ext
