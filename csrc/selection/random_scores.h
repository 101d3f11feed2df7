// Random scores of rows that matter equally: hashes of their row ids.
#pragma once

#include <cstdint>

#include "core/random.h"

namespace cpr_ext {

// Above zero, which is no score.
CPR_EXT_HOST_DEVICE constexpr uint32_t random_score(uint64_t salt, int64_t row_id) {
  return static_cast<uint32_t>(mix_bits(salt + static_cast<uint64_t>(row_id)) >> 32) | 1;
}

}  // namespace cpr_ext
