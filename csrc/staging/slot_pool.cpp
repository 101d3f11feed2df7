#include "staging/slot_pool.h"

#include <cassert>
#include <cstring>
#include <string>
#include <utility>

#include "core/error.h"
#include "core/huge_pages.h"

namespace cpr_ext {

namespace {
constexpr int64_t kPageBytes = 4096;
}

SlotLease::SlotLease(SlotLease&& other) noexcept
    : pool_(std::exchange(other.pool_, nullptr)), data_(std::exchange(other.data_, nullptr)) {}

SlotLease& SlotLease::operator=(SlotLease&& other) noexcept {
  if (this != &other) {
    release();
    pool_ = std::exchange(other.pool_, nullptr);
    data_ = std::exchange(other.data_, nullptr);
  }
  return *this;
}

SlotLease::~SlotLease() { release(); }

void SlotLease::release() {
  if (data_ != nullptr) pool_->give_back(std::exchange(data_, nullptr));
}

void SlotPool::FreeSlot::operator()(std::byte* data) const {
  free_huge(data, static_cast<size_t>(bytes));
}

SlotPool::SlotPool(int num_slots, int64_t slot_bytes) : slot_bytes_(slot_bytes) {
  if (num_slots < 1) {
    throw UsageError("num_slots is " + std::to_string(num_slots) + "; it must be at least 1");
  }
  if (slot_bytes < kPageBytes || slot_bytes % kPageBytes != 0) {
    throw UsageError("slot_bytes is " + std::to_string(slot_bytes) +
                     "; it must be a positive multiple of " + std::to_string(kPageBytes));
  }
  for (int i = 0; i < num_slots; ++i) {
    auto* data = static_cast<std::byte*>(allocate_huge(slot_bytes, kPageBytes));
    slots_.emplace_back(data, FreeSlot{slot_bytes});
    free_.push_back(data);
    // The system makes its pages now: training would wait for them in the first capture.
    std::memset(data, 0, static_cast<size_t>(slot_bytes));
  }
}

SlotPool::~SlotPool() { assert(free_.size() == slots_.size() && "a slot is still leased"); }

int SlotPool::num_free() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<int>(free_.size());
}

SlotLease SlotPool::acquire() {
  std::unique_lock<std::mutex> lock(mutex_);
  returned_.wait(lock, [&] { return !free_.empty(); });
  std::byte* slot = free_.back();
  free_.pop_back();
  return SlotLease(this, slot);
}

SlotLease SlotPool::try_acquire() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (free_.empty()) return SlotLease();
  std::byte* slot = free_.back();
  free_.pop_back();
  return SlotLease(this, slot);
}

void SlotPool::give_back(std::byte* slot) {
  // Notified under the lock: the waiter may be about to destroy the pool.
  std::lock_guard<std::mutex> lock(mutex_);
  free_.push_back(slot);
  returned_.notify_one();
}

}  // namespace cpr_ext
