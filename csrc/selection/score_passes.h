// Passes over the scores of a selection: the keys near its threshold, and the rows above it.
#pragma once

#include <cstdint>
#include <vector>

#include "selection/score_keys.h"

namespace cpr_ext {

constexpr int64_t kBlockRows = 1024;  // that a loop over scores treats at once

// Appends the keys of the rows [begin, end) from `low` to `high` to `found`, in their order;
// returns how many are above `high`.
int64_t collect_between(const CountKeys& keys, int64_t begin, int64_t end, uint32_t low,
                        uint32_t high, std::vector<uint32_t>* found);

// Writes the rows of [begin, end) with a key above `last`, ascending, from `out` on; returns their
// end. Nothing past it is written. Which rows are chosen cannot be predicted, so there is no branch
// per row.
int64_t* write_above(const CountKeys& keys, int64_t begin, int64_t end, uint32_t last,
                     int64_t* out);
int64_t* write_above(const FloatKeys& keys, int64_t begin, int64_t end, uint32_t last,
                     int64_t* out);

}  // namespace cpr_ext
