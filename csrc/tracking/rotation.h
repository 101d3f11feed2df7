// Where selections begin if all rows score the same, so that each has its turn.
//
// A selection begins behind the rows that were taken of the last one of its range, and behind the
// range's end again at its front. A range is one by its ends: nearly always the whole table.
#pragma once

#include <cstdint>
#include <vector>

#include "tracking/row_tracker.h"

namespace cpr_ext {

class Rotation {
 public:
  // The row that a selection of the range begins with. REQUIRES: the range is not empty.
  int64_t begin_selection(RowRange range);

  // Rows are about to be taken: where the selections that they are of began, for return_to().
  std::vector<RotationMark> marks(RowIds row_ids) const;

  // They were taken, all at once or part by part.
  void pass(RowIds row_ids) noexcept;

  // Their save failed: no selection begins behind them before they were taken again. Of several
  // failed saves, put back in any order, the earliest counts.
  void return_to(const std::vector<RotationMark>& marks) noexcept;

 private:
  // Positions count rows passed, and rise on where the range begins again.
  struct Turn {
    RowRange range;
    int64_t begin = 0;          // of the last selection
    int64_t end = 0;            // behind those of its rows that were taken
    bool is_selecting = false;  // it is later than the last return_to()

    int64_t begin_row() const { return range.begin + begin % range.size(); }
  };

  std::vector<Turn> turns_;  // a few
};

}  // namespace cpr_ext
