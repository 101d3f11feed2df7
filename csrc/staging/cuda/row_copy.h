// Gather and scatter of rows on a CUDA device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "staging/device_stager.h"
#include "staging/row_array.h"

namespace cpr_ext {

// A stager of `device` with `num_slots` buffers there of `slot_bytes`, or of half of that, and so
// on, as its memory allows: see DeviceStager::buffer_bytes().
// Throws UsageError if there is no such device, CudaError if not even small buffers fit.
std::shared_ptr<DeviceStager> make_device_stager(int device, int64_t slot_bytes, int num_slots);

// Packs rows of `arrays`, as they are when the device's stream gets here, into memory of the
// device: packed[i] gets those of arrays[i]. Only submits it. REQUIRES: all of it is on `device`,
// row_ids (count,) too; every array holds the rows.
void gather_on_device(int device, const std::vector<RowArray>& arrays, const int64_t* row_ids,
                      int64_t count, const std::vector<std::byte*>& packed);

}  // namespace cpr_ext
