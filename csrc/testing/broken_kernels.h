// Kernels with the faults that the emulated device is there to find.
#pragma once

#include <cuda_runtime.h>

#include <string>

namespace emulated_cuda {

// "none", "some threads miss a barrier", "a lane is not in its mask", "lanes disagree on the mask".
// What waiting for the kernel says; the device is as new afterwards.
cudaError_t run_broken_kernel(const std::string& fault);

}  // namespace emulated_cuda
