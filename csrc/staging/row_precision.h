// The precisions in which a file may have float32 rows, and how many bytes a row takes.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace cpr_ext {

// Rounded rows have a scale of their own, of float32, behind their elements: kFloat16 two bytes an
// element, then the scale; kInt8 one byte, then scale and bias, which is FBGEMM's row-wise layout.
enum class RowPrecision { kExact, kFloat16, kInt8 };

// Bytes of a row of `elements` float32 values.
CPR_EXT_HOST_DEVICE constexpr int64_t stored_row_bytes(RowPrecision precision, int64_t elements) {
  switch (precision) {
    case RowPrecision::kExact:
      return elements * 4;
    case RowPrecision::kFloat16:
      return elements * 2 + 4;
    case RowPrecision::kInt8:
      return elements + 8;
  }
  return 0;
}

}  // namespace cpr_ext
