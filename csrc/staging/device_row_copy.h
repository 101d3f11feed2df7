// Gather and scatter of rows on a CUDA device.
#pragma once

#include <memory>

#include "staging/device_stager.h"

namespace cpr_ext {

// A stager of `device` with `num_buffers` buffers of `buffer_bytes` there, or of half of that, and
// so on, as its memory allows: see DeviceStager::buffer_bytes().
// Throws UsageError if there is no such device, CudaError if not even small buffers fit.
std::shared_ptr<DeviceStager> make_device_stager(int device, int64_t buffer_bytes, int num_buffers);

}  // namespace cpr_ext
