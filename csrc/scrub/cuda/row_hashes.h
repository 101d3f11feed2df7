// The hashes of a table on a device, in its memory: compared there, only what differs comes to the
// host.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "scrub/row_hashes.h"
#include "tracking/row_tracker.h"

namespace cpr_ext {

// A comparison that a device makes when its stream gets there.
class PendingComparison {
 public:
  virtual ~PendingComparison() = default;
  virtual bool is_ready() = 0;       // does not wait
  virtual RowComparison read() = 0;  // waits; changed_row is the lowest
};

// All work goes to training's stream, see core/device_stream.h. Only range_values() and read() wait
// for it.
class DeviceRowHashes final : public RowHashes {
 public:
  // Throws UsageError if there is no such device, CudaError if its memory is full.
  DeviceRowHashes(std::string name, int64_t num_rows, int device);
  ~DeviceRowHashes() override;

  int device() const override { return device_; }
  void forget() override;

  // Records rows whose ids a device has. REQUIRES: read() of them was called.
  void record_chosen(const Arrays& arrays, const PendingRows& chosen);

  // Compares the rows of a range, but those that `tracker`, which is on this device, calls dirty
  // when the stream gets here; goes on after one that differs. Throws UsageError if there are too
  // many arrays.
  std::unique_ptr<PendingComparison> begin_compare(const Arrays& arrays, const RowTracker& tracker,
                                                   RowRange range);

 private:
  struct OnDevice;

  void hash_rows(const Arrays& arrays, RowIds row_ids, ThreadPool* pool) override;
  void hash_range(const Arrays& arrays, RowRange range, ThreadPool* pool) override;
  std::vector<uint16_t> copy_range(RowRange range) const override;

  const int device_;
  std::unique_ptr<OnDevice> on_device_;
};

}  // namespace cpr_ext
