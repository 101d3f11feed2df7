// Which rows of a table on a device are dirty: DirtyRows with its bits in the device's memory, and
// its rotation in the host's.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tracking/cuda/tracker.h"
#include "tracking/rotation.h"

namespace cpr_ext {

class DeviceBitmap;

class DeviceDirtyRows final : public DeviceTracker {
 public:
  // Throws UsageError if there is no such device, CudaError if its memory is full.
  DeviceDirtyRows(std::string name, int64_t num_rows, int device);
  ~DeviceDirtyRows() override;

  const char* kind() const override { return "DeviceDirtyRows"; }
  int64_t memory_bytes() const override;
  DirtyMarks dirty_marks() const override;

 private:
  std::unique_ptr<PendingRows> begin_select_best(RowRange range, int64_t k,
                                                 const WeightView* weight) const override;
  TakenRows clear_rows(RowIds row_ids, const WeightView* weight, ThreadPool* pool) override;
  TakenRows clear_chosen(const ChosenRows& chosen, RowIds row_ids,
                         const WeightView* weight) override;
  void restore(const TakenRows& taken) override;
  const TakenCodec& codec() const override;
  void launch_take(const RowList& rows, const WeightView* weight, uint32_t* values) override;
  void launch_put_back(const RowList& rows, const uint32_t* values) override;

  std::unique_ptr<DeviceBitmap> dirty_;
  mutable Rotation rotation_;
};

}  // namespace cpr_ext
