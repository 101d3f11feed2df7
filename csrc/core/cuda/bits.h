// One bit per row in a device's memory, as kernels see them; for *.cu only.
#pragma once

#include "core/cuda/device.h"

namespace cpr_ext {

constexpr int kBitsPerWord = 32;

inline int64_t num_bit_words(int64_t num_rows) {
  return (num_rows + kBitsPerWord - 1) / kBitsPerWord;
}

__device__ inline uint32_t bit_of(int64_t row) { return 1u << (row % kBitsPerWord); }

__device__ inline bool is_bit_set(const uint32_t* words, int64_t row) {
  return (words[row / kBitsPerWord] & bit_of(row)) != 0;
}

// Whether this thread is the one that set it. Rows in great demand mostly are set already, and only
// the others queue up.
__device__ inline bool set_bit(uint32_t* words, int64_t row) {
  if (is_bit_set(words, row)) return false;
  return (atomicOr(words + row / kBitsPerWord, bit_of(row)) & bit_of(row)) == 0;
}

__device__ inline void clear_bit(uint32_t* words, int64_t row) {
  atomicAnd(words + row / kBitsPerWord, ~bit_of(row));
}

}  // namespace cpr_ext
