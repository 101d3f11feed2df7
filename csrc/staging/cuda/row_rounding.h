// Rows of float32 on a device, rounded as they are gathered and restored as they are scattered: the
// kernels of CudaStager (row_copy.cu). For *.cu only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/cuda/device.h"
#include "staging/device_stager.h"

namespace cpr_ext {

// What the rows of one launch have in common.
struct RoundedRows {
  const int64_t* row_ids;  // on the device; null: the rows from range_begin on
  int64_t range_begin;
  int64_t count;
};

// A float32 array of a table, and its rows packed in fewer bits.
struct RoundedArray {
  std::byte* table;   // row `first_row_id`
  std::byte* packed;  // aligned to 16 bytes
  std::byte* exact;   // where rows that break the bound go, row i of the launch at i * row_bytes
  int64_t row_stride_bytes;
  int64_t first_row_id;
  int32_t elements;  // of a row
  RowPrecision precision;
  bool is_wide;  // four elements of a row can be read and written at once
};

// No table has more rounded arrays.
constexpr int kMostRoundedArrays = 32;

RoundedArray rounded_array(const StagedArray& array, std::byte* packed, std::byte* exact);

// Packs the rows of all arrays as gather_rounded() does, in one launch. errors[i] is the largest
// error of row i in the arrays where it is within the bound. If it breaks the bound in any, its
// sign is set, and the row is copied to `exact` of every array.
// REQUIRES: count > 0; at most kMostRoundedArrays arrays.
void launch_rounding(const RoundedRows& rows, const std::vector<RoundedArray>& arrays,
                     float* errors, cudaStream_t stream);

// Loads what launch_rounding() launches: see load_kernel().
void load_rounding();

// Writes packed rows to their places, as scatter_rounded() does. REQUIRES: the same; rows distinct.
void launch_restoring(const RoundedRows& rows, const std::vector<RoundedArray>& arrays,
                      cudaStream_t stream);

}  // namespace cpr_ext
