// The forms of row_rounding.h for one run of rows: portable, which is the specification, and for
// AVX-512.
#pragma once

#include <cstddef>
#include <cstdint>

#include "staging/row_rounding.h"

namespace cpr_ext {

constexpr float kFbgemmEpsilon = 1e-8f;  // FBGEMM adds it to the range of a row in int8
// Below this range no row is rounded: limits would be too small to be computed.
constexpr float kSmallestExtent = 0x1p-100f;
constexpr float kLargestExtent = 0x1.fffffep+127f;

// The bound of a row, half a step. The factor is a little less than that, for what rounds on the
// way.
constexpr float limit_factor(RowPrecision precision) {
  switch (precision) {
    case RowPrecision::kInt8:
      return static_cast<float>((1 - 0x1p-20) / (2 * 255));
    case RowPrecision::kInt4:
      return static_cast<float>((1 - 0x1p-20) / (2 * 15));
    case RowPrecision::kFloat16:
      return 0x1p-11f;
    default:
      return 0x1p-8f;
  }
}

// Infinity is no limit: nothing is within it.
inline float limit_of(RowPrecision precision, float extent) {
  if (!(extent <= kLargestExtent)) return -1;
  return extent < kSmallestExtent ? 0 : extent * limit_factor(precision);
}

// Rounds rows [begin, end) of `rows` into `out`, the place of row 0; see gather_rounded().
using RoundBlock = float (*)(const RowsOf& rows, RowPrecision precision, int64_t begin, int64_t end,
                             std::byte* out, uint8_t* broken);
// Its reverse.
using RestoreBlock = void (*)(const std::byte* stored, RowPrecision precision, int64_t begin,
                              int64_t end, const RowsOf& rows);

float round_block_portable(const RowsOf& rows, RowPrecision precision, int64_t begin, int64_t end,
                           std::byte* out, uint8_t* broken);
void restore_block_portable(const std::byte* stored, RowPrecision precision, int64_t begin,
                            int64_t end, const RowsOf& rows);
// Only where the CPU has AVX-512.
float round_block_avx512(const RowsOf& rows, RowPrecision precision, int64_t begin, int64_t end,
                         std::byte* out, uint8_t* broken);
void restore_block_avx512(const std::byte* stored, RowPrecision precision, int64_t begin,
                          int64_t end, const RowsOf& rows);

}  // namespace cpr_ext
