// Gather and scatter of rows on a CUDA device.
#pragma once

#include <memory>

#include "staging/device_stager.h"

namespace cpr_ext {

// A stager of `device` with `num_slots` buffers there of `slot_bytes`, or of half of that, and so
// on, as its memory allows: see DeviceStager::buffer_bytes().
// Throws UsageError if there is no such device, CudaError if not even small buffers fit.
std::shared_ptr<DeviceStager> make_device_stager(int device, int64_t slot_bytes, int num_slots);

}  // namespace cpr_ext
