// Slots between which and devices bytes are copied without holding anyone up.
#pragma once

#include <cstddef>
#include <vector>

#include "staging/device_stager.h"
#include "staging/slot_pool.h"

namespace cpr_ext {

// The slots of a pool are pinned while this lives. REQUIRES: pool and stager live longer.
class PinnedSlots {
 public:
  // For all devices, by the stager of one; null: nothing is pinned. Throws CudaError.
  PinnedSlots(SlotPool& slots, DeviceStager* stager);
  ~PinnedSlots() { unpin(); }
  PinnedSlots(const PinnedSlots&) = delete;
  PinnedSlots& operator=(const PinnedSlots&) = delete;

 private:
  void unpin() noexcept;

  DeviceStager* const stager_;
  std::vector<std::byte*> pinned_;
};

}  // namespace cpr_ext
