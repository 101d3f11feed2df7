// What a tracker forgot when rows were captured, so that a failed save can give it back.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/row_id_vector.h"

namespace cpr_ext {

// Invariant: of `counts` and `changes` the one the tracker uses has row_ids.size() entries, the
// other none.
struct TakenRows {
  std::string tracker;           // name of the table it was taken from
  std::string kind;              // class of the tracker
  RowIdVector row_ids;           // ascending; only rows that were dirty
  std::vector<uint32_t> counts;  // AccessCounter: access count; RowSampler: 1 if it was sampled
  std::vector<float> changes;    // ChangeMeter: L2 change

  int64_t num_rows() const { return static_cast<int64_t>(row_ids.size()); }
};

}  // namespace cpr_ext
