#include "tracking/access_counter.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "selection/top_rows.h"

namespace cpr_ext {

namespace {

constexpr uint32_t kHighestCount = std::numeric_limits<uint32_t>::max();

constexpr int kGroupShift = 6;  // rows of a group: those of one cache line, four times
constexpr int kWordShift = 9;   // rows of eight groups, whose marks are read at once

// One add to memory per lookup: a third faster than the saturating loop, most of all on skewed
// lookups, where each count waits for the last one of its row. Prefetching ahead was measured to
// gain nothing: the adds are independent enough to overlap their misses.
template <class Index>
void count_indices(uint32_t* counts, uint8_t* touched, const Index* indices, int64_t num_indices) {
  for (int64_t i = 0; i < num_indices; ++i) {
    const auto row_id = static_cast<uint64_t>(indices[i]);
    if (counts[row_id]++ == 0) touched[row_id >> kGroupShift] = 1;
  }
}

template <class Index>
void count_saturating(uint32_t* counts, uint8_t* touched, const Index* indices,
                      int64_t num_indices) {
  for (int64_t i = 0; i < num_indices; ++i) {
    const auto row_id = static_cast<uint64_t>(indices[i]);
    const uint32_t count = counts[row_id];
    counts[row_id] = count + (count != kHighestCount);
    if (count == 0) touched[row_id >> kGroupShift] = 1;
  }
}

// The `k` with the highest count, ties by lowest id, of row ids in ascending order.
RowIdVector best_of(RowIdVector row_ids, const uint32_t* counts, int64_t k) {
  if (static_cast<int64_t>(row_ids.size()) <= k) return row_ids;
  std::nth_element(row_ids.begin(), row_ids.begin() + k, row_ids.end(),
                   [counts](int64_t a, int64_t b) {
                     return counts[a] != counts[b] ? counts[a] > counts[b] : a < b;
                   });
  row_ids.resize(static_cast<size_t>(k));
  std::sort(row_ids.begin(), row_ids.end());
  return row_ids;
}

}  // namespace

AccessCounter::AccessCounter(std::string name, int64_t num_rows)
    : RowTracker(std::move(name), num_rows),
      counts_(static_cast<size_t>(num_rows)),
      touched_((static_cast<size_t>((num_rows - 1) >> kWordShift) + 1) * sizeof(uint64_t)) {}

int64_t AccessCounter::memory_bytes() const {
  return static_cast<int64_t>(counts_.size() * sizeof(uint32_t) + touched_.size());
}

void AccessCounter::observe(const Lookup& lookup) {
  visit_indices(lookup, [&](const auto* indices, int64_t num_indices) {
    if (num_indices <= headroom_) {
      count_indices(counts_.begin(), touched_.data(), indices, num_indices);
      headroom_ -= num_indices;
    } else {
      headroom_ = 0;
      count_saturating(counts_.begin(), touched_.data(), indices, num_indices);
    }
  });
}

// The marks of eight groups, a byte of 0 or 1 each, the first one lowest.
uint64_t AccessCounter::marks_of(int64_t word) const {
  uint64_t marks;
  std::memcpy(&marks, &touched_[word * sizeof(marks)], sizeof(marks));
  return marks;
}

// Calls body(begin, end) for the rows of each group that may have dirty ones, cut to the range, in
// ascending order, while it returns true. `any` of the group's counts says whether it has some.
template <class Body>
void AccessCounter::visit_groups(RowRange range, const Body& body) const {
  if (range.size() == 0) return;
  const int64_t last_word = (range.end - 1) >> kWordShift;
  for (int64_t word = range.begin >> kWordShift; word <= last_word; ++word) {
    for (uint64_t marks = marks_of(word); marks != 0; marks &= marks - 1) {
      const int64_t group = (word << 3) + __builtin_ctzll(marks) / 8;
      const int64_t first = group << kGroupShift;
      const int64_t stop = std::min(num_rows(), first + (int64_t{1} << kGroupShift));
      if (stop <= range.begin || first >= range.end) continue;
      uint32_t any = 0;
      for (int64_t row_id = first; row_id < stop; ++row_id) any |= counts_[row_id];
      if (any == 0) {
        touched_[group] = 0;
      } else if (!body(std::max(first, range.begin), std::min(stop, range.end))) {
        return;
      }
    }
  }
}

// Whether so few groups may have dirty rows that visiting them is faster than reading all counts.
bool AccessCounter::has_few_groups(RowRange range) const {
  int64_t num_groups = 0;
  for (int64_t row_id = range.begin; row_id < range.end; row_id += int64_t{1} << kWordShift) {
    num_groups += __builtin_popcountll(marks_of(row_id >> kWordShift));
  }
  return num_groups << kGroupShift <= range.size() / 4;
}

int64_t AccessCounter::count_dirty(RowRange range) const {
  int64_t count = 0;
  visit_groups(range, [&](int64_t begin, int64_t end) {
    for (int64_t row_id = begin; row_id < end; ++row_id) count += counts_[row_id] != 0;
    return true;
  });
  return count;
}

int64_t AccessCounter::sum_counts(RowRange range) const {
  check_range(range);
  settle();
  int64_t sum = 0;
  visit_groups(range, [&](int64_t begin, int64_t end) {
    for (int64_t row_id = begin; row_id < end; ++row_id) sum += counts_[row_id];
    return true;
  });
  return sum;
}

bool AccessCounter::has_no_dirty(RowRange range) const {
  if (range.size() == 1) return counts_[range.begin] == 0;
  bool is_clean = true;
  visit_groups(range, [&](int64_t begin, int64_t end) {
    for (int64_t row_id = begin; row_id < end; ++row_id) is_clean &= counts_[row_id] == 0;
    return is_clean;
  });
  return is_clean;
}

RowIdVector AccessCounter::list_dirty(RowRange range) const {
  return select_best(range, range.size(), nullptr, nullptr);
}

RowIdVector AccessCounter::select_best(RowRange range, int64_t k, const WeightView*,
                                       ThreadPool* pool) const {
  if (has_few_groups(range)) {
    RowIdVector dirty;
    visit_groups(range, [&](int64_t begin, int64_t end) {
      for (int64_t row_id = begin; row_id < end; ++row_id) {
        if (counts_[row_id] != 0) dirty.push_back(row_id);
      }
      return true;
    });
    return best_of(std::move(dirty), counts_.begin(), k);
  }
  RowIdVector row_ids = top_rows(counts_.begin() + range.begin, range.size(), k, pool);
  if (range.begin != 0) {
    for (int64_t& row_id : row_ids) row_id += range.begin;
  }
  return row_ids;
}

// A group that has no dirty row any more need not be visited: of a point few rows are dirty, and
// training waits until they are found.
void AccessCounter::forget_clean_groups(const RowIdVector& row_ids) {
  int64_t last_group = -1;
  for (const int64_t row_id : row_ids) {
    const int64_t group = row_id >> kGroupShift;
    if (group == last_group) continue;
    last_group = group;
    const int64_t first = group << kGroupShift;
    const int64_t stop = std::min(num_rows(), first + (int64_t{1} << kGroupShift));
    uint32_t any = 0;
    for (int64_t row = first; row < stop; ++row) any |= counts_[row];
    if (any == 0) touched_[group] = 0;
  }
}

TakenRows AccessCounter::clear_rows(RowIds row_ids, const WeightView*, ThreadPool*) {
  TakenRows taken = nothing_taken();
  taken.row_ids.reserve(row_ids.size);
  taken.counts.reserve(row_ids.size);
  for (int64_t i = 0; i < row_ids.size; ++i) {
    const int64_t row_id = row_ids.data[i];
    const uint32_t count = counts_[row_id];
    if (count == 0) continue;
    taken.row_ids.push_back(row_id);
    taken.counts.push_back(count);
    counts_[row_id] = 0;
  }
  forget_clean_groups(taken.row_ids);
  return taken;
}

TakenRows AccessCounter::clear_range(RowRange range, const WeightView*, ThreadPool* pool) {
  TakenRows taken = nothing_taken();
  taken.row_ids = select_best(range, range.size(), nullptr, pool);
  taken.counts.reserve(taken.row_ids.size());
  // Pages that no count was ever written to stay untouched: the system would have to make them.
  for (const int64_t row_id : taken.row_ids) {
    taken.counts.push_back(counts_[row_id]);
    counts_[row_id] = 0;
  }
  forget_clean_groups(taken.row_ids);
  if (range.size() == num_rows()) headroom_ = kHighestCount;
  return taken;
}

void AccessCounter::restore(const TakenRows& taken) {
  for (size_t i = 0; i < taken.row_ids.size(); ++i) {
    const int64_t row_id = taken.row_ids[i];
    uint32_t& count = counts_[row_id];
    touched_[row_id >> kGroupShift] = 1;
    count += std::min(taken.counts[i], kHighestCount - count);
    headroom_ = std::min<int64_t>(headroom_, kHighestCount - count);
  }
}

}  // namespace cpr_ext
