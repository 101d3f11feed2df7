// How many rows a loop over scores treats at once.
#pragma once

#include <cstdint>

namespace cpr_ext {

constexpr int64_t kBlockRows = 1024;

}  // namespace cpr_ext
