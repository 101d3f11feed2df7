// Random scores of rows that matter equally: hashes of their row ids.
#pragma once

#include <cstdint>

#include "core/random.h"

namespace cpr_ext {

// Rows that come first score above all others; none scores zero, which is no score.
constexpr uint32_t kFirstScore = uint32_t{1} << 31;

CPR_EXT_HOST_DEVICE constexpr uint32_t random_score(uint64_t salt, int64_t row_id, bool is_first) {
  const uint64_t bits = mix_bits(salt + static_cast<uint64_t>(row_id));
  return static_cast<uint32_t>(bits >> 33) | 1 | (is_first ? kFirstScore : 0);
}

}  // namespace cpr_ext
