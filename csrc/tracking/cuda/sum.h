// Numbers that all threads of a grid add to, and the host reads; for *.cu only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/cuda/device.h"
#include "core/cuda/host_link.h"
#include "tracking/cuda/grid.h"

namespace cpr_ext {

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
