// What a tracker forgot when rows were captured, so that a failed save can give it back.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/row_id_vector.h"

namespace cpr_ext {

struct TakenRows;

// Rows that a device still holds; reading them waits for it.
class LateRows {
 public:
  virtual ~LateRows() = default;
  virtual void read(TakenRows* taken) = 0;  // fills row_ids and what belongs to them
};

// Where the last selection of a range began before rows of it were taken; see rotation.h.
struct RotationMark {
  int64_t range_begin;
  int64_t range_end;
  int64_t position;
};

// Invariant: of `counts` and `changes` the one the tracker uses has row_ids.size() entries, the
// other none. While there is `late`, these three are empty; see settle().
struct TakenRows {
  std::string tracker;           // name of the table it was taken from
  std::string kind;              // class of the tracker
  RowIdVector row_ids;           // ascending; only rows that were dirty
  std::vector<uint32_t> counts;  // AccessCounter: access count; RowSampler: 1 if it was sampled
  std::vector<float> changes;    // ChangeMeter: L2 change
  std::shared_ptr<LateRows> late;
  std::vector<RotationMark> marks;  // DirtyRows

  // Reads what is late; if it throws, nothing has changed.
  void settle() {
    if (!late) return;
    late->read(this);
    late.reset();
  }

  int64_t num_rows() const { return static_cast<int64_t>(row_ids.size()); }
};

}  // namespace cpr_ext
