// How the kernels of this room are laid out, and the sums that all their threads add to; for *.cu
// only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/cuda/device.h"
#include "core/cuda/host_link.h"

namespace cpr_ext {

constexpr int kThreads = 256;          // of a block
constexpr int64_t kMostBlocks = 2048;  // of a grid whose threads take several elements
constexpr unsigned kAllLanes = 0xffffffffu;

inline int64_t blocks_for(int64_t size, int64_t per_block = kThreads) {
  return (size + per_block - 1) / per_block;
}

// The number of this thread in the whole grid.
__device__ inline int64_t thread_of_grid() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}

// All lanes of a warp call it.
template <class T>
__device__ void add_over_warps(T mine, unsigned long long* sum) {
  for (int delta = 16; delta > 0; delta /= 2) mine += __shfl_down_sync(kAllLanes, mine, delta);
  if (threadIdx.x % 32 == 0 && mine != 0) atomicAdd(sum, static_cast<unsigned long long>(mine));
}

// What launch(sums, stream) adds to so many sums on the device; waits for it once.
template <class Launch>
std::vector<int64_t> sums_on_device(int device, size_t num_sums, Launch&& launch) {
  static_assert(sizeof(unsigned long long) == sizeof(int64_t), "sums are downloaded as they are");
  std::vector<int64_t> found(num_sums);
  const size_t bytes = num_sums * sizeof(int64_t);
  const DeviceGuard guard(device);
  const cudaStream_t stream = stream_of(device);
  const StreamMemory sums(static_cast<int64_t>(bytes), stream);
  CPR_EXT_CUDA(cudaMemsetAsync(sums.as<void>(), 0, bytes, stream));
  launch(sums.as<unsigned long long>(), stream);
  HostLink::of(device).download(found.data(), sums.as<void>(), static_cast<int64_t>(bytes), stream);
  return found;
}

}  // namespace cpr_ext
