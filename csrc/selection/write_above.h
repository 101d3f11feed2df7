// The last pass of a selection: the rows above a threshold, in order.
#pragma once

#include <cstdint>

#include "selection/score_keys.h"

namespace cpr_ext {

// Writes the rows of [begin, end) with a key above `last`, ascending, from `out` on; returns their
// end. Nothing past it is written. Which rows are chosen cannot be predicted, so there is no branch
// per row.
int64_t* write_above(const CountKeys& keys, int64_t begin, int64_t end, uint32_t last,
                     int64_t* out);
int64_t* write_above(const FloatKeys& keys, int64_t begin, int64_t end, uint32_t last,
                     int64_t* out);

}  // namespace cpr_ext
