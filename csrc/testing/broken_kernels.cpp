#include "testing/broken_kernels.h"

#include "testing/emulated_device.h"

namespace emulated_cuda {
namespace {

void faultless_kernel() {
  __syncthreads();
  __shfl_sync(0xffffffffu, 1, 0);
}

void missed_barrier_kernel() {
  if (threadIdx.x != 3) __syncthreads();
  __shfl_sync(0xffffffffu, 1, 0);
}

void wrong_mask_kernel() {
  if (threadIdx.x < 8) __shfl_sync(0xf0u, 1, 0);
}

void two_masks_kernel() { __shfl_sync(threadIdx.x < 8 ? 0xffu : 0xffffffffu, 1, 0); }

}  // namespace

cudaError_t run_broken_kernel(const std::string& fault) {
  void (*kernel)() = faultless_kernel;
  if (fault == "some threads miss a barrier") kernel = missed_barrier_kernel;
  if (fault == "a lane is not in its mask") kernel = wrong_mask_kernel;
  if (fault == "lanes disagree on the mask") kernel = two_masks_kernel;
  cudaLaunchConfig_t config = {};
  config.blockDim.x = 64;
  (void)cudaLaunchKernelEx(&config, kernel);
  const cudaError_t error = cudaStreamSynchronize(nullptr);
  repair();
  return error;
}

}  // namespace emulated_cuda
