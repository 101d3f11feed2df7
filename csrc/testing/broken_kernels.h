// Kernels with the faults that the emulated device is there to find.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>

namespace emulated_cuda {

// "none", "some threads miss a barrier", "a lane is not in its mask", "lanes disagree on the mask".
// What waiting for the kernel says; the device is as new afterwards.
cudaError_t run_broken_kernel(const std::string& fault);

// A kernel's sum of shared memory, of which each thread has set its own part to 1, or, wrongly, has
// relied on zeros: with two blocks, each of 64 threads.
uint64_t sum_shared(bool clears);

}  // namespace emulated_cuda
