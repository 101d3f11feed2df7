#include "tracking/dirty_rows.h"

#include <algorithm>

namespace cpr_ext {

DirtyRows::DirtyRows(std::string name, int64_t num_rows)
    : RowTracker(std::move(name), num_rows), words_(word_of(num_rows - 1) + 1) {}

int64_t DirtyRows::memory_bytes() const {
  return static_cast<int64_t>(words_.size() * sizeof(uint64_t));
}

void DirtyRows::observe(const Lookup& lookup) {
  visit_indices(lookup, [&](const auto* indices, int64_t num_indices) {
    for (int64_t i = 0; i < num_indices; ++i) mark(indices[i]);
  });
}

int64_t DirtyRows::num_dirty_besides(const DirtyRows& others, RowRange range) const {
  int64_t count = 0;
  for_each_word(range, [&](size_t word, uint64_t bits) {
    count += __builtin_popcountll(bits & ~others.words_[word]);
    return true;
  });
  return count;
}

int64_t DirtyRows::count_dirty(RowRange range) const {
  int64_t count = 0;
  for_each_word(range, [&](size_t, uint64_t bits) {
    count += __builtin_popcountll(bits);
    return true;
  });
  return count;
}

bool DirtyRows::has_no_dirty(RowRange range) const {
  bool clean = true;
  for_each_word(range, [&](size_t, uint64_t bits) { return clean = bits == 0; });
  return clean;
}

// Writes the first `size` dirty rows of the range. REQUIRES: it has as many.
void DirtyRows::write_dirty(RowRange range, int64_t* row_ids, int64_t size) const {
  const int64_t* const end = row_ids + size;
  for_each_word(range, [&](size_t word, uint64_t bits) {
    for (; bits != 0 && row_ids != end; bits &= bits - 1) {
      *row_ids++ = static_cast<int64_t>(word * 64) + __builtin_ctzll(bits);
    }
    return row_ids != end;
  });
}

RowIdVector DirtyRows::list_dirty(RowRange range) const {
  RowIdVector row_ids(static_cast<size_t>(count_dirty(range)));
  write_dirty(range, row_ids.data(), static_cast<int64_t>(row_ids.size()));
  return row_ids;
}

RowIdVector DirtyRows::select_best(RowRange range, int64_t k, const WeightView*,
                                   ThreadPool*) const {
  if (range.size() == 0) return {};
  const int64_t first = rotation_.begin_selection(range);
  const RowRange ahead{first, range.end};
  const RowRange behind{range.begin, first};
  const int64_t num_ahead = std::min(k, count_dirty(ahead));
  const int64_t left = k - num_ahead;
  const int64_t num_behind = left == 0 ? 0 : std::min(left, count_dirty(behind));
  RowIdVector row_ids(static_cast<size_t>(num_behind + num_ahead));
  write_dirty(behind, row_ids.data(), num_behind);
  write_dirty(ahead, row_ids.data() + num_behind, num_ahead);
  return row_ids;
}

TakenRows DirtyRows::clear_rows(RowIds row_ids, const WeightView*, ThreadPool*) {
  TakenRows taken = nothing_taken();
  for (int64_t i = 0; i < row_ids.size; ++i) {
    if (is_dirty(row_ids.data[i])) taken.row_ids.push_back(row_ids.data[i]);
  }
  taken.marks = rotation_.marks(row_ids);
  for (const int64_t row_id : taken.row_ids) clear(row_id);
  rotation_.pass(row_ids);
  return taken;
}

TakenRows DirtyRows::clear_range(RowRange range, const WeightView*, ThreadPool*) {
  TakenRows taken = nothing_taken();
  taken.row_ids = list_dirty(range);
  for_each_word(range, [&](size_t word, uint64_t bits) {
    words_[word] &= ~bits;
    return true;
  });
  return taken;
}

void DirtyRows::restore(const TakenRows& taken) {
  for (const int64_t row_id : taken.row_ids) mark(row_id);
  rotation_.return_to(taken.marks);
}

}  // namespace cpr_ext
