#include "testing/emulated_memory.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include "testing/emulated_machine.h"

using namespace emulated_cuda;  // NOLINT: these are its functions

namespace {

// Memory that was freed. Its own stream may have it again at once, in the order of that stream;
// others once the stream has got to where it was freed.
struct FreeBlock {
  void* data;
  size_t bytes;
  EmulatedStream* stream;
  int64_t number;  // of the call that freed it
  bool is_reached = false;
};

}  // namespace

struct EmulatedMemPool {
  int device = 0;
  uint64_t threshold = 0;
  uint64_t held_bytes = 0;
  std::vector<FreeBlock> unused;
};

namespace {

struct Pools {
  std::vector<EmulatedMemPool*> all;
  std::map<void*, std::pair<EmulatedMemPool*, size_t>> in_use;  // with its size
  int64_t num_mapped = 0;
  int64_t num_freed = 0;
};

// Guarded by the machine's mutex.
Pools& pools() {
  static auto* const pools = new Pools;
  return *pools;
}

void give_back(EmulatedMemPool* pool, uint64_t kept_bytes) {
  auto& unused = pool->unused;
  for (size_t i = 0; i < unused.size() && pool->held_bytes > kept_bytes;) {
    if (!unused[i].is_reached) {
      ++i;
      continue;
    }
    pool->held_bytes -= unused[i].bytes;
    ASAN_UNPOISON_MEMORY_REGION(unused[i].data, unused[i].bytes);
    std::free(unused[i].data);
    unused.erase(unused.begin() + static_cast<int64_t>(i));
  }
}

// The newest first: what is used too late meets its next owner's bytes.
void* take_unused(EmulatedMemPool* pool, size_t bytes, EmulatedStream* stream) {
  auto& unused = pool->unused;
  const auto fits = [&](const FreeBlock& block) {
    return block.bytes == bytes && (block.is_reached || block.stream == stream);
  };
  const auto found = std::find_if(unused.rbegin(), unused.rend(), fits);
  if (found == unused.rend()) return nullptr;
  void* const data = found->data;
  unused.erase(std::next(found).base());
  return data;
}

}  // namespace

namespace emulated_cuda {

size_t guarded_size(size_t bytes) { return (bytes + kGuardBytes + kUnit - 1) / kUnit * kUnit; }

void begin_use(void* data, size_t bytes) {
  const size_t size = guarded_size(bytes);
  ASAN_UNPOISON_MEMORY_REGION(data, size);
  std::memset(data, kGarbage, size);
  ASAN_POISON_MEMORY_REGION(data, size);
  ASAN_UNPOISON_MEMORY_REGION(data, bytes);
  machine().device_memory[data] = bytes;
}

void end_use(void* data) {
  const auto found = machine().device_memory.find(data);
  if (found == machine().device_memory.end()) return;
  const size_t bytes = found->second;
  machine().device_memory.erase(found);
  const auto* const begin = static_cast<unsigned char*>(data);
  const size_t size = guarded_size(bytes);
  ASAN_UNPOISON_MEMORY_REGION(data, size);
  if (std::all_of(begin + bytes, begin + size, [](auto byte) { return byte == kGarbage; })) return;
  machine().is_broken = true;
  note(cudaErrorLaunchFailure);
}

cudaError_t allocate(void** data, size_t bytes) {
  *data = std::aligned_alloc(kUnit, guarded_size(bytes));
  if (*data == nullptr) return note(cudaErrorMemoryAllocation);
  begin_use(*data, bytes);
  return cudaSuccess;
}

void release(void* data) {
  end_use(data);
  std::free(data);
}

int64_t mappings() {
  Lock lock(machine().mutex);
  return std::exchange(pools().num_mapped, 0);
}

int64_t pooled_bytes() {
  Lock lock(machine().mutex);
  int64_t held = 0;
  for (const EmulatedMemPool* pool : pools().all) held += static_cast<int64_t>(pool->held_bytes);
  return held;
}

void give_back_memory() {
  for (EmulatedMemPool* pool : pools().all) give_back(pool, pool->threshold);
}

}  // namespace emulated_cuda

cudaError_t cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps* props) {
  Lock lock(machine().mutex);
  if (const cudaError_t error = begin_call("cudaMemPoolCreate", InCapture::kUnsafe)) return error;
  if (!machine().has_pools) return note(cudaErrorNotSupported);
  *pool = new EmulatedMemPool;
  (*pool)->device = props->location.id;
  pools().all.push_back(*pool);
  return cudaSuccess;
}

cudaError_t cudaMemPoolDestroy(cudaMemPool_t pool) {
  Lock lock(machine().mutex);
  run_all();
  give_back(pool, 0);
  auto& all = pools().all;
  all.erase(std::find(all.begin(), all.end(), pool));
  delete pool;
  return cudaSuccess;
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, cudaMemPoolAttr, void* value) {
  Lock lock(machine().mutex);
  pool->threshold = *static_cast<uint64_t*>(value);
  return cudaSuccess;
}

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, cudaMemPoolAttr, void* value) {
  Lock lock(machine().mutex);
  *static_cast<uint64_t*>(value) = pool->held_bytes;
  return cudaSuccess;
}

cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t kept_bytes) {
  Lock lock(machine().mutex);
  if (const cudaError_t error = begin_call("cudaMemPoolTrimTo", InCapture::kUnsafe)) return error;
  give_back(pool, kept_bytes);
  return cudaSuccess;
}

cudaError_t cudaMallocFromPoolAsync(void** data, size_t bytes, cudaMemPool_t pool,
                                    cudaStream_t stream) {
  Lock lock(machine().mutex);
  if (const cudaError_t error = begin_call("cudaMallocFromPoolAsync")) return error;
  const size_t size = guarded_size(bytes);
  void* found = take_unused(pool, size, of(stream));
  if (found == nullptr) {
    found = std::aligned_alloc(kUnit, size);
    if (found == nullptr) return note(cudaErrorMemoryAllocation);
    pool->held_bytes += size;
    ++pools().num_mapped;
  }
  pools().in_use[found] = {pool, size};
  *data = found;
  submit(stream, [found, bytes] { begin_use(found, bytes); });
  return cudaSuccess;
}

cudaError_t cudaFreeAsync(void* data, cudaStream_t stream) {
  Lock lock(machine().mutex);
  const auto found = pools().in_use.find(data);
  if (found == pools().in_use.end()) return note(cudaErrorInvalidValue);
  const auto [pool, size] = found->second;
  pools().in_use.erase(found);
  const int64_t number = ++pools().num_freed;
  pool->unused.push_back({data, size, of(stream), number});
  submit(stream, [data = data, pool = pool, size = size, number] {
    end_use(data);
    std::memset(data, kGarbage, size);
    ASAN_POISON_MEMORY_REGION(data, size);
    for (FreeBlock& block : pool->unused) block.is_reached |= block.number == number;
  });
  return cudaSuccess;
}
