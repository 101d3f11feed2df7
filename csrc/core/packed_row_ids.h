// Ascending row ids in few bits, by the scheme of Elias (J. ACM 21(2), 1974) and Fano (MIT Project
// MAC memo 61, 1971): at most 2 + log2(range / count) bits an id.
//
// Of id - first, the `low` lowest bits are stored as they are, id after id; low = floor(log2(range
// / count)). The rest r is stored in unary: of the i-th id, bit r + i is 1 and all others are 0.
// Both parts begin at a byte, and bits fill a byte from its lowest.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cpr_ext {

// What a file says of packed ids next to their bytes.
struct RowIdRun {
  int64_t count = 0;
  int64_t first = 0;  // the smallest id
  int64_t last = 0;   // the largest
};

// Whether there can be such ids: each below 2^62.
constexpr bool is_possible(const RowIdRun& run) {
  return run.count > 0 && run.first >= 0 && run.last >= run.first &&
         run.last < (int64_t{1} << 62) && run.count - 1 <= run.last - run.first &&
         (run.count > 1 || run.first == run.last);
}

// REQUIRES (all): is_possible(run).
int64_t packed_bytes(const RowIdRun& run);

// REQUIRES: ids (run.count,) ascend from run.first to run.last; out has packed_bytes(run).
void pack_row_ids(const int64_t* ids, const RowIdRun& run, std::byte* out);

// False if the bytes are not those of such ids; then `ids` (run.count,) has no meaning.
bool unpack_row_ids(const std::byte* packed, const RowIdRun& run, int64_t* ids);

}  // namespace cpr_ext
