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

constexpr size_t kShortPart = 16;  // less of a device free than this part of it: memory is short

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
  bool freed = false;
  if (MemoryPool* const pool = MemoryPool::find(device)) CPR_EXT_CUDA(pool->trim(&freed));
  MemoryReclaimer call;
  {
    std::lock_guard<std::mutex> lock(reclaimer().mutex);
    call = reclaimer().call;
  }
  return (call && call(device)) || freed;
}

void trim_memory(int device) {
  MemoryPool* const pool = MemoryPool::find(device);
  if (pool == nullptr) return;
  const DeviceGuard guard(device);
  bool freed = false;
  CPR_EXT_CUDA(pool->trim(&freed));
}

void trim_memory_if_short(int device) {
  const DeviceGuard guard(device);
  size_t free_bytes = 0;
  size_t all_bytes = 0;
  CPR_EXT_CUDA(cudaMemGetInfo(&free_bytes, &all_bytes));
  if (free_bytes < all_bytes / kShortPart) trim_memory(device);
}

MemoryPool::MemoryPool(int device) : device_(device) {
  int has_pools = 0;
  CPR_EXT_CUDA(cudaDeviceGetAttribute(&has_pools, cudaDevAttrMemoryPoolsSupported, device));
  if (has_pools == 0) return;
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

MemoryPool* MemoryPool::find(int device) {
  std::lock_guard<std::mutex> lock(pools_mutex());
  const auto known = pools().find(device);
  return known == pools().end() ? nullptr : known->second.get();
}

cudaError_t MemoryPool::allocate(void** data, size_t bytes, cudaStream_t stream) {
  return allocate_or_reclaim(device_, [&] {
    if (pool_ == nullptr) return allocate_block(data, bytes, stream);
    return cudaMallocFromPoolAsync(data, bytes, pool_, stream);
  });
}

cudaError_t MemoryPool::free(void* data, cudaStream_t stream) {
  if (pool_ != nullptr) return cudaFreeAsync(data, stream);
  std::lock_guard<std::mutex> lock(blocks_.mutex);
  blocks_.unused.emplace(std::make_pair(stream, blocks_.sizes.at(data)), data);
  return cudaSuccess;
}

cudaError_t MemoryPool::trim(bool* freed) {
  *freed = false;
  if (pool_ == nullptr) return free_blocks(freed);
  uint64_t before = 0;
  uint64_t after = 0;
  cudaError_t code = cudaMemPoolGetAttribute(pool_, cudaMemPoolAttrReservedMemCurrent, &before);
  if (code == cudaSuccess) code = cudaMemPoolTrimTo(pool_, 0);
  if (code == cudaSuccess) {
    code = cudaMemPoolGetAttribute(pool_, cudaMemPoolAttrReservedMemCurrent, &after);
  }
  *freed = after < before;
  return code;
}

cudaError_t MemoryPool::allocate_block(void** data, size_t bytes, cudaStream_t stream) {
  std::lock_guard<std::mutex> lock(blocks_.mutex);
  const auto found = blocks_.unused.lower_bound({stream, bytes});  // the smallest that holds it
  if (found != blocks_.unused.end() && found->first.first == stream &&
      found->first.second / 2 <= bytes) {
    *data = found->second;
    blocks_.unused.erase(found);
    return cudaSuccess;
  }
  const cudaError_t code = cudaMalloc(data, bytes);
  if (code == cudaSuccess) blocks_.sizes[*data] = bytes;
  return code;
}

// cudaFree() waits for what uses the memory.
cudaError_t MemoryPool::free_blocks(bool* freed) {
  std::lock_guard<std::mutex> lock(blocks_.mutex);
  cudaError_t code = cudaSuccess;
  for (const auto& [_, data] : blocks_.unused) {
    const cudaError_t error = cudaFree(data);
    if (code == cudaSuccess) code = error;
    blocks_.sizes.erase(data);
    *freed = true;
  }
  blocks_.unused.clear();
  return code;
}

}  // namespace cpr_ext
