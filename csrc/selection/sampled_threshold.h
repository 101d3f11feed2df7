// The threshold of large counts, in one pass over them: a sample estimates it.
#pragma once

#include <cstdint>
#include <optional>

#include "selection/radix_threshold.h"
#include "selection/score_keys.h"

namespace cpr_ext {

// The threshold between the best `wanted` keys and the others, exact. Nothing if the sample cannot
// bracket it (few rows, a threshold below `lowest`, many equal keys) or brackets it wrongly: then
// use radix_threshold(). Needs 4 bytes for each key in the bracket: of about 3 % of the rows, of
// 1/8 at most.
std::optional<Threshold> sampled_threshold(const CountKeys& keys, const Parts& parts,
                                           int64_t wanted, uint32_t lowest);

}  // namespace cpr_ext
