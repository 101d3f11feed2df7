// Rows of tables on a device into slots of host memory, and back, in the order of the stream that
// training uses. What the pipeline knows of a device; cuda/row_copy.h implements it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "staging/row_array.h"
#include "staging/row_precision.h"
#include "staging/slot_pool.h"

namespace cpr_ext {

// Bytes on their way between a slot and a device. The slot is not free before wait() has returned
// or this is destroyed, which waits too.
class Arrival {
 public:
  virtual ~Arrival() = default;
  virtual void wait() = 0;  // throws CudaError if they will not arrive
};

// Rows of a table: `row_ids` (count,), or if null the rows from first_row_id on.
struct StagedRows {
  const int64_t* row_ids = nullptr;
  int64_t first_row_id = 0;
  int64_t count = 0;
  // Nothing changes them any more: they are copied beside the stream, once it had got to where
  // settle() was called last.
  bool are_settled = false;
};

// An array of the table, and where in the slot its packed rows lie.
struct StagedArray {
  RowArray rows;
  int64_t offset = 0;
  RowPrecision precision = RowPrecision::kExact;  // of the packed rows; else float32 on the device

  int64_t packed_row_bytes() const {
    return precision == RowPrecision::kExact ? rows.row_bytes
                                             : stored_row_bytes(precision, rows.row_bytes / 4);
  }
};

class DeviceStager {
 public:
  virtual ~DeviceStager() = default;

  virtual int device() const = 0;

  // Memory on the device that one gather or scatter fills before the next has to wait for a copy.
  virtual int64_t buffer_bytes() const = 0;

  // Makes host memory such that copies from any device into it hold nothing up.
  virtual void pin(std::byte* slot, int64_t bytes) = 0;
  virtual void unpin(std::byte* slot) noexcept = 0;  // REQUIRES: pinned, all has arrived

  // Packs rows of `arrays`, as they are when the stream gets here, into `slot`. Only submits it:
  // rows may change as soon as whoever changes them submits that to the same stream.
  // REQUIRES: every array lies on this device and holds the rows; `row_ids` stay until arrival.
  virtual std::unique_ptr<Arrival> gather(const std::vector<StagedArray>& arrays,
                                          const StagedRows& rows, std::byte* slot) = 0;

  // Rows that are written until the stream gets here may be gathered as settled from now on, on any
  // thread.
  virtual void settle() = 0;

  // Writes packed rows to the rows of `arrays`, which have them, as float32 if they were rounded,
  // when the stream gets here.
  // REQUIRES: as gather; the rows are distinct; `slot`, which is pinned or else is copied more
  // slowly, and `row_ids` stay until arrival.
  virtual std::unique_ptr<Arrival> scatter(const std::vector<StagedArray>& arrays,
                                           const StagedRows& rows, const std::byte* slot) = 0;

  // Waits until everything submitted is done; throws CudaError if any of it has failed.
  virtual void finish() = 0;
};

// The slots of a pool are pinned while this lives. REQUIRES: pool and stager live longer.
class PinnedSlots {
 public:
  // For all devices, by the stager of one; null: nothing is pinned. Throws CudaError.
  PinnedSlots(SlotPool& slots, DeviceStager* stager) : stager_(stager) {
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
  ~PinnedSlots() { unpin(); }
  PinnedSlots(const PinnedSlots&) = delete;
  PinnedSlots& operator=(const PinnedSlots&) = delete;

 private:
  void unpin() noexcept {
    for (std::byte* slot : pinned_) stager_->unpin(slot);
  }

  DeviceStager* const stager_;
  std::vector<std::byte*> pinned_;
};

}  // namespace cpr_ext
