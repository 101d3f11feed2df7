#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "core/cuda/device.h"
#include "core/cuda/memory_pool.h"

namespace cpr_ext {

namespace {

struct Reclaimer {
  std::mutex mutex;
  MemoryReclaimer call;
};

Reclaimer& reclaimer() {
  static auto* const reclaimer = new Reclaimer;
  return *reclaimer;
}

std::mutex& pools_mutex() {
  static auto* const mutex = new std::mutex;
  return *mutex;
}

// Guarded by pools_mutex().
std::map<int, std::unique_ptr<MemoryPool>>& pools() {
  static auto* const pools = new std::map<int, std::unique_ptr<MemoryPool>>;
  return *pools;
}

}  // namespace

void set_memory_reclaimer(MemoryReclaimer call) {
  std::lock_guard<std::mutex> lock(reclaimer().mutex);
  reclaimer().call = std::move(call);
}

bool reclaim_memory(int device) {
  MemoryReclaimer call;
  {
    std::lock_guard<std::mutex> lock(reclaimer().mutex);
    call = reclaimer().call;
  }
  return call && call(device);
}

void trim_memory(int device) {
  MemoryPool* pool = nullptr;
  {
    std::lock_guard<std::mutex> lock(pools_mutex());
    const auto known = pools().find(device);
    if (known != pools().end()) pool = known->second.get();
  }
  if (pool == nullptr) return;
  const DeviceGuard guard(device);
  CPR_EXT_CUDA(pool->trim());
}

MemoryPool::MemoryPool(int device) : device_(device) {
  cudaMemPoolProps props = {};
  props.allocType = cudaMemAllocationTypePinned;
  props.location.type = cudaMemLocationTypeDevice;
  props.location.id = device;
  CPR_EXT_CUDA(cudaMemPoolCreate(&pool_, &props));
  uint64_t kept_bytes = std::numeric_limits<uint64_t>::max();
  CPR_EXT_CUDA(cudaMemPoolSetAttribute(pool_, cudaMemPoolAttrReleaseThreshold, &kept_bytes));
}

MemoryPool& MemoryPool::of(int device) {
  std::lock_guard<std::mutex> lock(pools_mutex());
  std::unique_ptr<MemoryPool>& pool = pools()[device];
  if (!pool) pool.reset(new MemoryPool(device));
  return *pool;
}

cudaError_t MemoryPool::allocate(void** data, size_t bytes, cudaStream_t stream) {
  return allocate_or_reclaim(device_,
                             [&] { return cudaMallocFromPoolAsync(data, bytes, pool_, stream); });
}

cudaError_t MemoryPool::trim() { return cudaMemPoolTrimTo(pool_, 0); }

}  // namespace cpr_ext
