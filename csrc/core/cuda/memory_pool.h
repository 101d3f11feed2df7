// Memory of a device that this library allocates in the order of streams; for *.cu only.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <utility>

#include "core/cuda/device.h"

namespace cpr_ext {

// Keeps what is freed until it is trimmed: CUDA's default pool gives it back whenever anybody waits
// for the device, which training does at each step, and to map it again takes longer than to use
// it. Where the device has no pools, such as some virtual GPUs, it keeps blocks of cudaMalloc().
class MemoryPool {
 public:
  // Of this device, made when first asked for; it lives as long as the process.
  static MemoryPool& of(int device);
  static MemoryPool* find(int device);  // null: nobody has asked for it

  // REQUIRES: the device is current.
  cudaError_t allocate(void** data, size_t bytes, cudaStream_t stream);
  cudaError_t free(void* data, cudaStream_t stream);
  // Gives back what is unused. freed: whether there was any.
  cudaError_t trim(bool* freed);

 private:
  // Of cudaMalloc(). A stream has memory again that was freed on it, which is in its order.
  struct KeptBlocks {
    std::mutex mutex;  // guards the two below
    std::map<void*, size_t> sizes;
    std::multimap<std::pair<cudaStream_t, size_t>, void*> unused;
  };

  explicit MemoryPool(int device);

  cudaError_t allocate_block(void** data, size_t bytes, cudaStream_t stream);
  cudaError_t free_blocks(bool* freed);

  const int device_;
  cudaMemPool_t pool_ = nullptr;  // null: the device has none
  KeptBlocks blocks_;
};

// Gives back what the pool of this device keeps, then calls the MemoryReclaimer of
// core/device_stream.h, if there is one. Returns whether anything was freed. REQUIRES: the device
// is current.
bool reclaim_memory(int device);

// Allocates by `allocate`, a call that returns an error; once more if memory is short and there was
// something to free. REQUIRES: the device is current.
template <class Allocate>
cudaError_t allocate_or_reclaim(int device, const Allocate& allocate) {
  const cudaError_t code = allocate();
  if (code != cudaErrorMemoryAllocation) return code;
  (void)cudaGetLastError();
  return reclaim_memory(device) ? allocate() : code;
}

}  // namespace cpr_ext
