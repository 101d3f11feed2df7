// Keys of a range of values, collected in one pass.
#pragma once

#include <cstdint>
#include <vector>

#include "selection/score_keys.h"

namespace cpr_ext {

// Appends the keys of the rows [begin, end) from `low` to `high` to `found`, in their order;
// returns how many are above `high`.
int64_t collect_between(const CountKeys& keys, int64_t begin, int64_t end, uint32_t low,
                        uint32_t high, std::vector<uint32_t>* found);

}  // namespace cpr_ext
