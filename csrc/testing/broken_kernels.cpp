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

void misread_sums_kernel(bool waits, unsigned long long* misread) {
  __shared__ unsigned of_warps[kThreads / 32];
  for (unsigned round = 1; round <= 2; ++round) {
    const unsigned mine = __shfl_sync(0xffffffffu, round, 0);  // here a warp is held up
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = mine;
    __syncthreads();
    if (of_warps[0] + of_warps[1] != 2 * round) atomicAdd(misread, 1ull);
    if (waits) __syncthreads();
  }
}

void fill_kernel(uint32_t* elements, int64_t count) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < count) elements[i] = 1;
}

}  // namespace

cudaError_t overrun_memory(int64_t num_elements, int64_t num_more) {
  cudaMemPool_t pool;
  cudaMemPoolProps properties = {};
  (void)cudaMemPoolCreate(&pool, &properties);
  void* memory;
  (void)cudaMallocFromPoolAsync(&memory, static_cast<size_t>(num_elements) * sizeof(uint32_t), pool,
                                nullptr);
  cudaLaunchConfig_t config = {};
  config.gridDim.x = static_cast<unsigned>((num_elements + num_more) / kThreads + 1);
  config.blockDim.x = kThreads;
  (void)cudaLaunchKernelEx(&config, fill_kernel, static_cast<uint32_t*>(memory),
                           num_elements + num_more);
  (void)cudaFreeAsync(memory, nullptr);
  const cudaError_t error = cudaStreamSynchronize(nullptr);
  repair();
  (void)cudaMemPoolDestroy(pool);
  return error;
}

uint64_t misread_sums(bool waits) {
  unsigned long long misread = 0;
  cudaLaunchConfig_t config = {};
  config.blockDim.x = kThreads;
  (void)cudaLaunchKernelEx(&config, misread_sums_kernel, waits, &misread);
  (void)cudaStreamSynchronize(nullptr);
  return misread;
}

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
