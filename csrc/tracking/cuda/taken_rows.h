// What a tracker on a device forgot when rows were captured, left there until somebody asks; for
// *.cu only.
#pragma once

#include <cstdint>
#include <vector>

#include "core/cuda/device.h"
#include "tracking/cuda/tracker.h"
#include "tracking/taken_rows.h"

namespace cpr_ext {

// One value per row that was taken, zero for a row that was not dirty.
class DeviceTakenRows final : public LateRows {
 public:
  // The rows are row_ids, or if it is empty those of the range.
  DeviceTakenRows(int device, std::vector<int64_t> row_ids, RowRange range, const TakenCodec& codec,
                  cudaStream_t stream);

  uint32_t* values() { return values_.as<uint32_t>(); }  // (num_rows), for the kernel to fill
  void read(TakenRows* taken) override;

 private:
  int64_t num_rows() const;

  int device_;
  std::vector<int64_t> row_ids_;
  RowRange range_;
  const TakenCodec& codec_;  // as long as the process
  cudaStream_t stream_;
  StreamMemory values_;
};

}  // namespace cpr_ext
