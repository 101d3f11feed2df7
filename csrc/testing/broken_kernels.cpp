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

constexpr int kThreads = 64;

void sum_shared_kernel(bool clears, unsigned long long* sum) {
  __shared__ unsigned parts[kThreads];
  if (clears) parts[threadIdx.x] = 0;
  parts[threadIdx.x] += 1;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (const unsigned part : parts) *sum += part;
}

}  // namespace

uint64_t sum_shared(bool clears) {
  unsigned long long sum = 0;
  cudaLaunchConfig_t config = {};
  config.gridDim.x = 2;
  config.blockDim.x = kThreads;
  (void)cudaLaunchKernelEx(&config, sum_shared_kernel, clears, &sum);
  (void)cudaStreamSynchronize(nullptr);
  return sum;
}

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
