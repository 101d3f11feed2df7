// SCAR of a table on a device: ChangeMeter with its copy of the weight in the device's memory.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tracking/cuda/tracker.h"
#include "tracking/weight_view.h"

namespace cpr_ext {

// Changes are ChangeMeter's, bit for bit. What differs:
//  - What NaN there is comes to light late. The rows of a selection raise NanError when they are
//    read. take() passes a row that holds NaN over: it stays dirty, with its score.
//  - What failed saves gave back has an array of its own, of 4 bytes per row.
class DeviceChangeMeter final : public DeviceTracker {
 public:
  // Copies the weight, which lies on `device`. Throws UsageError, and CudaError if the device has
  // no memory for the copy.
  DeviceChangeMeter(std::string name, const WeightView& weight, int device);
  ~DeviceChangeMeter() override;

  const char* kind() const override { return "DeviceChangeMeter"; }
  bool needs_weight() const override { return true; }
  int64_t memory_bytes() const override;
  DirtyMarks dirty_marks() const override;

 private:
  std::unique_ptr<PendingRows> begin_select_best(RowRange range, int64_t k,
                                                 const WeightView* weight) const override;
  const TakenCodec& codec() const override;
  void launch_take(const RowList& rows, const WeightView* weight, uint32_t* values) override;
  void launch_put_back(const RowList& rows, const uint32_t* values) override;

  struct OnDevice;

  const MeasuredWeight weight_;
  std::unique_ptr<OnDevice> on_device_;
};

}  // namespace cpr_ext
