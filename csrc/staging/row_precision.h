// The precisions in which a file may have float32 rows, and how many bytes a row takes.
#pragma once

#include <cstdint>

namespace cpr_ext {

// kInt8 and kInt4 are FBGEMM's row-wise layout: the levels, then scale and bias. int8: one byte an
// element; both as float32. int4: two elements a byte, the first in the low half; both as float16.
enum class RowPrecision { kExact, kFloat16, kBFloat16, kInt8, kInt4 };

// Bytes of a row of `elements` float32 values.
constexpr int64_t stored_row_bytes(RowPrecision precision, int64_t elements) {
  switch (precision) {
    case RowPrecision::kExact:
      return elements * 4;
    case RowPrecision::kFloat16:
    case RowPrecision::kBFloat16:
      return elements * 2;
    case RowPrecision::kInt8:
      return elements + 8;
    case RowPrecision::kInt4:
      return (elements + 1) / 2 + 4;
  }
  return 0;
}

}  // namespace cpr_ext
