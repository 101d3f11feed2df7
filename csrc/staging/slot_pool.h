// The staging slots: a fixed number of page-aligned host buffers, leased and returned. They are all
// the memory a snapshot or a recovery takes, whatever the table's size.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace cpr_ext {

class SlotPool;

// A leased slot, returned to its pool when it goes out of scope. Movable; the pool outlives it.
class SlotLease {
 public:
  SlotLease() = default;
  SlotLease(SlotLease&& other) noexcept;
  SlotLease& operator=(SlotLease&& other) noexcept;
  ~SlotLease();

  explicit operator bool() const { return data_ != nullptr; }
  std::byte* data() const { return data_; }

 private:
  friend class SlotPool;
  SlotLease(SlotPool* pool, std::byte* data) : pool_(pool), data_(data) {}
  void release();

  SlotPool* pool_ = nullptr;
  std::byte* data_ = nullptr;
};

class SlotPool {
 public:
  // REQUIRES: num_slots >= 1; slot_bytes a positive multiple of the page size.
  SlotPool(int num_slots, int64_t slot_bytes);
  ~SlotPool();

  int num_slots() const { return static_cast<int>(slots_.size()); }
  int64_t slot_bytes() const { return slot_bytes_; }
  int num_free() const;

  template <class Body>
  void for_each_slot(const Body& body) {
    for (const auto& slot : slots_) body(slot.get());
  }

  SlotLease acquire();      // waits until a slot is free
  SlotLease try_acquire();  // an empty lease if none is free

 private:
  friend class SlotLease;
  void give_back(std::byte* slot);

  struct FreeSlot {
    int64_t bytes;
    void operator()(std::byte* data) const;
  };
  const int64_t slot_bytes_;
  std::vector<std::unique_ptr<std::byte, FreeSlot>> slots_;
  mutable std::mutex mutex_;
  std::condition_variable returned_;
  std::vector<std::byte*> free_;  // guarded by mutex_
};

}  // namespace cpr_ext
