// One array of a table as it lies in memory: the weight, or one per-row optimizer state.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/dtype.h"

namespace cpr_ext {

class DeviceStager;

struct RowArray {
  std::byte* data = nullptr;     // row `first_row_id`
  int64_t num_rows = 0;          // rows in this process's memory
  int64_t row_bytes = 0;         // contiguous bytes of one row
  int64_t row_stride_bytes = 0;  // distance between rows, >= row_bytes
  int64_t first_row_id = 0;      // the table's row id of the first row in memory
  DType dtype = DType::kOther;
  DeviceStager* stager = nullptr;  // of the device whose memory `data` is; null: the host's

  // REQUIRES: first_row_id <= row_id < first_row_id + num_rows
  std::byte* row(int64_t row_id) const { return data + (row_id - first_row_id) * row_stride_bytes; }
  bool holds(int64_t row_id) const {
    return row_id >= first_row_id && row_id - first_row_id < num_rows;
  }
};

}  // namespace cpr_ext
