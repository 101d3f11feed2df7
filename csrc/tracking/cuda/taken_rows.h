// What a tracker on a device forgot when rows were captured, left there until somebody asks; for
// *.cu only.
#pragma once

#include <cstdint>
#include <vector>

#include "core/cuda/device.h"
#include "tracking/cuda/tracker.h"
#include "tracking/taken_rows.h"

namespace cpr_ext {

// Which rows were taken: the chosen ones, or else row_ids, or if that is empty those of the range.
struct RowNames {
  ChosenRows chosen;
  std::vector<int64_t> row_ids;
  RowRange range;

  int64_t size() const {
    if (chosen.all) return chosen.count;
    return row_ids.empty() ? range.size() : static_cast<int64_t>(row_ids.size());
  }
};

// One value per row that was taken, zero for a row that was not dirty.
class DeviceTakenRows final : public LateRows {
 public:
  DeviceTakenRows(int device, RowNames names, const TakenCodec& codec, cudaStream_t stream);

  uint32_t* values() { return values_.as<uint32_t>(); }  // (num_rows), for the kernel to fill
  void read(TakenRows* taken) override;

 private:
  int device_;
  RowNames names_;
  const TakenCodec& codec_;  // as long as the process
  cudaStream_t stream_;
  StreamMemory values_;
};

}  // namespace cpr_ext
