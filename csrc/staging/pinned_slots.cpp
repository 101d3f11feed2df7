#include "staging/pinned_slots.h"

namespace cpr_ext {

PinnedSlots::PinnedSlots(SlotPool& slots, DeviceStager* stager) : stager_(stager) {
  if (stager_ == nullptr) return;
  try {
    slots.for_each_slot([&](std::byte* slot) {
      stager_->pin(slot, slots.slot_bytes());
      pinned_.push_back(slot);
    });
  } catch (...) {
    unpin();
    throw;
  }
}

void PinnedSlots::unpin() noexcept {
  for (std::byte* slot : pinned_) stager_->unpin(slot);
}

}  // namespace cpr_ext
