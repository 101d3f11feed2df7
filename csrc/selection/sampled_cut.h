// The cut of large counts, in one pass over them: a sample tells about where it is.
#pragma once

#include <cstdint>
#include <optional>

#include "selection/radix_cut.h"
#include "selection/score_keys.h"

namespace cpr_ext {

// The cut between the best `wanted` keys and the others, exact; nothing if the sample does not tell
// (few rows, a cut below `lowest`, many equal keys), or tells wrong: then another way must be
// taken. Needs 4 bytes for each key about the cut: of about 3 % of the rows, of 1/8 at most.
std::optional<Cut> sampled_cut(const CountKeys& keys, const Parts& parts, int64_t wanted,
                               uint32_t lowest);

}  // namespace cpr_ext
