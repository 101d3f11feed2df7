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

// How many threads of a block of two warps read a wrong sum: each warp puts its part into shared
// memory twice, and waits, or, wrongly, does not wait until all have read the first.
uint64_t misread_sums(bool waits);

// What freeing memory says of which a kernel has written so many elements more than it has.
cudaError_t overrun_memory(int64_t num_elements, int64_t num_more);

}  // namespace emulated_cuda
