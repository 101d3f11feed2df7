#include "tracking/rotation.h"

#include <algorithm>

namespace cpr_ext {

namespace {

bool is_same(RowRange a, RowRange b) { return a.begin == b.begin && a.end == b.end; }

// Those of ascending row ids that lie in the range.
RowIds inside(RowIds row_ids, RowRange range) {
  const int64_t* const end = row_ids.data + row_ids.size;
  const int64_t* const first = std::lower_bound(row_ids.data, end, range.begin);
  return {first, std::lower_bound(first, end, range.end) - first};
}

}  // namespace

int64_t Rotation::begin_selection(RowRange range) {
  auto turn = std::find_if(turns_.begin(), turns_.end(),
                           [&](const Turn& each) { return is_same(each.range, range); });
  if (turn == turns_.end()) turn = turns_.insert(turn, Turn{range});
  turn->begin = turn->end;
  turn->is_selecting = true;
  return turn->begin_row();
}

std::vector<RotationMark> Rotation::marks(RowIds row_ids) const {
  std::vector<RotationMark> marks;
  for (const Turn& turn : turns_) {
    if (inside(row_ids, turn.range).size == 0) continue;
    marks.push_back({turn.range.begin, turn.range.end, turn.begin});
  }
  return marks;
}

void Rotation::pass(RowIds row_ids) noexcept {
  for (Turn& turn : turns_) {
    const RowIds taken = inside(row_ids, turn.range);
    if (!turn.is_selecting || taken.size == 0) continue;
    const int64_t first = turn.begin_row();
    const RowIds wrapped = inside(taken, {turn.range.begin, first});
    const bool has_wrapped = wrapped.size > 0;
    const int64_t last = has_wrapped ? wrapped.data[wrapped.size - 1] : taken.data[taken.size - 1];
    const int64_t passed = last - first + (has_wrapped ? turn.range.size() : 0) + 1;
    turn.end = std::max(turn.end, turn.begin + passed);
  }
}

void Rotation::return_to(const std::vector<RotationMark>& marks) noexcept {
  for (const RotationMark& mark : marks) {
    for (Turn& turn : turns_) {
      if (!is_same(turn.range, {mark.range_begin, mark.range_end})) continue;
      turn.begin = turn.end = std::min(turn.begin, mark.position);
      turn.is_selecting = false;
    }
  }
}

}  // namespace cpr_ext
