// Rows of float32 on a device, rounded as they are gathered and restored as they are scattered: the
// kernels of CudaStager (row_copy.cu). For *.cu only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/cuda/device.h"
#include "staging/device_stager.h"

namespace cpr_ext {

// Rows of a float32 array of a table, and where they are packed in fewer bits.
struct RoundedRows {
  RowArray table;
  RowPrecision precision;
  std::byte* packed;       // aligned to 16 bytes
  const int64_t* row_ids;  // on the device; null: the rows from range_begin on
  int64_t range_begin;
  int64_t count;
};

// Packs the rows as gather_rounded() does. REQUIRES: count > 0.
void launch_rounding(const RoundedRows& rows, cudaStream_t stream);

// Loads what launch_rounding() launches: see load_kernel().
void load_rounding();

// Writes packed rows to their places, as scatter_rounded() does. REQUIRES: the same; rows distinct.
void launch_restoring(const RoundedRows& rows, cudaStream_t stream);

}  // namespace cpr_ext
