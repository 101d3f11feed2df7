// MFU of a table on a device: AccessCounter with its counts in the device's memory.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tracking/cuda/tracker.h"

namespace cpr_ext {

class DeviceAccessCounter final : public DeviceTracker {
 public:
  // Throws UsageError if there is no such device, CudaError if its memory is full.
  DeviceAccessCounter(std::string name, int64_t num_rows, int device);
  ~DeviceAccessCounter() override;

  const char* kind() const override { return "DeviceAccessCounter"; }
  int64_t memory_bytes() const override;
  void observe_all(const std::vector<Observation>& observations) override;
  DirtyMarks dirty_marks() const override;

  std::vector<uint32_t> counts() const;  // (num_rows), a copy
  int64_t sum_counts(RowRange range) const;

 private:
  std::unique_ptr<PendingRows> begin_select_best(RowRange range, int64_t k,
                                                 const WeightView* weight) const override;
  const TakenCodec& codec() const override;
  void launch_take(const RowList& rows, const WeightView* weight, uint32_t* values) override;
  void launch_put_back(const RowList& rows, const uint32_t* values) override;

  struct OnDevice;

  std::unique_ptr<OnDevice> on_device_;
  // Invariant: no count can saturate within so many lookups, but for those of graphs.
  int64_t headroom_ = UINT32_MAX;
  bool is_in_graph_ = false;  // nobody counts how often a graph is launched
};

}  // namespace cpr_ext
