#include <atomic>

#include "core/error.h"
#include "tracking/cuda/fault.h"

namespace cpr_ext {

DeviceFault::DeviceFault(cudaStream_t stream)
    : is_claimed_(sizeof(unsigned)), fault_(sizeof(Fault)) {
  CPR_EXT_CUDA(cudaMemsetAsync(is_claimed_.data(), 0, sizeof(unsigned), stream));
  *reinterpret_cast<Fault*>(fault_.data()) = Fault{};
}

void DeviceFault::report(const std::string& table, int64_t num_rows, int device) const {
  auto* const fault = reinterpret_cast<volatile Fault*>(fault_.data());
  if (fault->is_set == 0) return;
  std::atomic_thread_fence(std::memory_order_acquire);  // with the fence of FaultNote::take()
  const int64_t index = fault->index;
  const int64_t position = fault->position;
  fault->is_set = 0;
  const DeviceGuard guard(device);
  CPR_EXT_CUDA(cudaMemsetAsync(is_claimed_.data(), 0, sizeof(unsigned), stream_of(device)));
  throw RowIndexError("table '" + table + "': index " + std::to_string(index) + " at position " +
                      std::to_string(position) + " of an earlier lookup on device " +
                      std::to_string(device) + "; allowed: 0 to " + std::to_string(num_rows - 1) +
                      " (num_rows is " + std::to_string(num_rows) +
                      "). Indices outside were not counted");
}

}  // namespace cpr_ext
