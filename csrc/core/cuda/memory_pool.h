// Memory of a device that this library allocates in the order of streams; for *.cu only.
#pragma once

#include <cstddef>

#include "core/cuda/device.h"

namespace cpr_ext {

// Keeps what is freed until trim_memory(): CUDA's default pool gives it back whenever anybody waits
// for the device, which training does at each step, and to map it again takes longer than to use
// it.
class MemoryPool {
 public:
  // Of this device, made when first asked for; it lives as long as the process.
  static MemoryPool& of(int device);

  // REQUIRES: the device is current.
  cudaError_t allocate(void** data, size_t bytes, cudaStream_t stream);
  cudaError_t trim();

 private:
  explicit MemoryPool(int device);

  int device_;
  cudaMemPool_t pool_ = nullptr;
};

// Calls the MemoryReclaimer of core/device_stream.h, if there is one.
bool reclaim_memory(int device);

// Allocates by `allocate`, a call that returns an error; once more if memory is short and there was
// something to free.
template <class Allocate>
cudaError_t allocate_or_reclaim(int device, const Allocate& allocate) {
  const cudaError_t code = allocate();
  if (code != cudaErrorMemoryAllocation) return code;
  (void)cudaGetLastError();
  return reclaim_memory(device) ? allocate() : code;
}

}  // namespace cpr_ext
