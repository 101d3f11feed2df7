// Scores as 32-bit keys of the same order, zero for a zero score.
#pragma once

#include <cstdint>
#include <cstring>

namespace cpr_ext {

struct CountKeys {
  static constexpr int kShift = 0;  // from a score's bits to its key

  const uint32_t* scores;
  uint32_t operator[](int64_t row_id) const { return scores[row_id]; }
};

// The bits of a float that is not negative rise with its value; losing the sign makes -0 a zero.
// Integers throughout: a thread that takes subnormals for zero must come to the same answer.
struct FloatKeys {
  static constexpr int kShift = 1;
  static constexpr uint32_t kInfinityBits = 0x7f800000;
  static constexpr uint32_t kMinusZeroBits = 0x80000000;

  const float* scores;
  uint32_t operator[](int64_t row_id) const { return bits(row_id) << kShift; }
  bool is_score(int64_t row_id) const {
    return bits(row_id) <= kInfinityBits || bits(row_id) == kMinusZeroBits;
  }
  uint32_t bits(int64_t row_id) const {
    uint32_t result;
    std::memcpy(&result, scores + row_id, sizeof(result));
    return result;
  }
};

// As FloatKeys, with the sign kept.
struct FloatBits {
  FloatKeys keys;
  uint32_t operator[](int64_t row_id) const { return keys.bits(row_id); }
};

}  // namespace cpr_ext
