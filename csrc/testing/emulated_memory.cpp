#include "testing/emulated_memory.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "testing/emulated_machine.h"

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

}  // namespace emulated_cuda
