// The emulated device's memory pools, as tests observe them; cudaMallocFromPoolAsync() uses them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace emulated_cuda {

// How often pools have taken memory from the device since the last request: what takes time.
int64_t mappings();

// Bytes that pools hold, in use or not.
int64_t pooled_bytes();

// What every wait for a device does: pools give it back what is unused, down to their threshold.
// REQUIRES: the machine's mutex is held.
void give_back_memory();

}  // namespace emulated_cuda
