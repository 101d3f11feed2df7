// Indices outside their table, found by a device and told to the host without anyone waiting; for
// *.cu only.
#pragma once

#include <cstdint>
#include <string>

#include "core/cuda/device.h"

namespace cpr_ext {

// The first bad index since faults were last reported, in memory of the host that devices write to.
struct Fault {
  int64_t index;
  int64_t position;
  uint32_t is_set;
};

// What a kernel notes faults in; copied into its parameters.
struct FaultNote {
  Fault* fault;
  unsigned* is_claimed;  // in the device's memory

  __device__ void take(int64_t index, int64_t position) const {
    if (atomicCAS(is_claimed, 0u, 1u) != 0) return;
    auto* const noted = static_cast<volatile Fault*>(fault);
    noted->index = index;
    noted->position = position;
    __threadfence_system();
    noted->is_set = 1;
  }
};

// Of one table on the device that is current when it is made.
class DeviceFault {
 public:
  explicit DeviceFault(cudaStream_t stream);

  FaultNote note() const { return {fault_.on_device<Fault>(), is_claimed_.as<unsigned>()}; }

  // Throws RowIndexError, once, if there is one; does not wait for the device.
  void report(const std::string& table, int64_t num_rows, int device) const;

 private:
  DeviceMemory is_claimed_;
  PinnedMemory fault_;
};

}  // namespace cpr_ext
