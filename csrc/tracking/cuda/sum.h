// A number that all threads of a grid add to, and the host reads; for *.cu only.
#pragma once

#include <cstdint>

#include "core/cuda/device.h"
#include "core/cuda/host_link.h"
#include "tracking/cuda/grid.h"

namespace cpr_ext {

// All lanes of a warp call it.
__device__ inline void add_over_warps(unsigned mine, unsigned long long* sum) {
  for (int delta = 16; delta > 0; delta /= 2) mine += __shfl_down_sync(kAllLanes, mine, delta);
  if (threadIdx.x % 32 == 0 && mine != 0) atomicAdd(sum, static_cast<unsigned long long>(mine));
}

// What launch(sum, stream) adds up on the device; waits for it.
template <class Launch>
int64_t sum_on_device(int device, Launch&& launch) {
  const DeviceGuard guard(device);
  const cudaStream_t stream = stream_of(device);
  const StreamMemory sum(sizeof(unsigned long long), stream);
  CPR_EXT_CUDA(cudaMemsetAsync(sum.as<void>(), 0, sizeof(unsigned long long), stream));
  launch(sum.as<unsigned long long>(), stream);
  unsigned long long found = 0;
  HostLink::of(device).download(&found, sum.as<void>(), sizeof(found), stream);
  return static_cast<int64_t>(found);
}

}  // namespace cpr_ext
