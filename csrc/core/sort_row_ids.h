// Sorts the few row ids of a step: faster than std::sort, as they have few digits.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "core/row_id_vector.h"

namespace cpr_ext {

// Radix sort (LSD) by bytes, as many as the largest has. REQUIRES: none is negative.
inline void sort_row_ids(RowIdVector* row_ids) {
  constexpr int kBits = 8;
  constexpr size_t kFew = 64;
  if (row_ids->size() < kFew) {
    std::sort(row_ids->begin(), row_ids->end());
    return;
  }
  const int64_t largest = *std::max_element(row_ids->begin(), row_ids->end());
  RowIdVector sorted(row_ids->size());
  for (int shift = 0; shift < 64 && (largest >> shift) > 0; shift += kBits) {
    const auto digit = [shift](int64_t row_id) { return row_id >> shift & ((1 << kBits) - 1); };
    std::array<size_t, (1 << kBits) + 1> begins{};  // of the ids with each digit
    for (const int64_t row_id : *row_ids) ++begins[digit(row_id) + 1];
    for (size_t i = 1; i < begins.size(); ++i) begins[i] += begins[i - 1];
    for (const int64_t row_id : *row_ids) sorted[begins[digit(row_id)]++] = row_id;
    row_ids->swap(sorted);
  }
}

}  // namespace cpr_ext
