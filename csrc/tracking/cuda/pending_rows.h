// Rows that a device is choosing, for whoever asks later; for *.cu only.
#pragma once

#include "selection/cuda/rows.h"
#include "tracking/row_tracker.h"

namespace cpr_ext {

class DevicePendingRows : public PendingRows {
 public:
  // Scores: of the rows of `range`, one of selection/cuda/scores.h. REQUIRES: the device is
  // current.
  template <class Scores>
  DevicePendingRows(int device, const Scores& scores, RowRange range, int64_t k)
      : device_(device), rows_(scores, range.size(), k, range.begin, stream_of(device)) {}

  bool is_ready() override {
    const DeviceGuard guard(device_);
    return rows_.is_ready();
  }

  RowIdVector read() override {
    const DeviceGuard guard(device_);
    return rows_.read(device_);
  }

  int64_t num_rows() const override { return rows_.num_rows(); }
  const int64_t* ids_on_device() const override { return rows_.ids_on_device(); }

 protected:
  const int device_;

 private:
  DeviceRows rows_;
};

}  // namespace cpr_ext
