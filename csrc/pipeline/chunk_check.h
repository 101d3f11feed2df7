// What is done with captured rows before they are written: checksums, and a search for NaN.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "pipeline/segment_plan.h"

namespace cpr_ext {

// The CRC32C of each piece of `chunk`, whose bytes lie in `data` one piece after the other.
// row_ids: of the chunk's table, all of them; null for a range.
// Throws NanError, naming table, row and array, for the first NaN, if `refuse_nan`.
std::vector<uint32_t> check_captured(const SegmentTable& table, const int64_t* row_ids,
                                     const Chunk& chunk, const std::byte* data, bool refuse_nan);

}  // namespace cpr_ext
