#include "tracking/row_tracker.h"

#include <algorithm>
#include <limits>
#include <map>
#include <type_traits>

#include "core/error.h"
#include "core/instruction_set.h"

namespace cpr_ext {

namespace {

// True if an index is negative or above `last`. An index in range leaves the sign bit of both
// itself and (last - index) clear, which a vector unit can test without unsigned comparison.
template <class Index>
CPR_EXT_KERNEL_BODY bool any_outside_body(const Index* indices, int64_t num_indices,
                                          int64_t num_rows) {
  using Unsigned = std::make_unsigned_t<Index>;
  constexpr int64_t kHighest = std::numeric_limits<Index>::max();
  const auto last = static_cast<Unsigned>(std::min(num_rows - 1, kHighest));
  Unsigned signs = 0;
  for (int64_t i = 0; i < num_indices; ++i) {
    const auto index = static_cast<Unsigned>(indices[i]);
    signs |= index | (last - index);
  }
  return (signs >> (8 * sizeof(Index) - 1)) != 0;
}

template <class Index>
CPR_EXT_AVX512 bool any_outside_avx512(const Index* indices, int64_t num_indices,
                                       int64_t num_rows) {
  return any_outside_body(indices, num_indices, num_rows);
}

template <class Index>
bool any_outside(const Index* indices, int64_t num_indices, int64_t num_rows) {
  return instruction_set() == InstructionSet::kAvx512
             ? any_outside_avx512(indices, num_indices, num_rows)
             : any_outside_body(indices, num_indices, num_rows);
}

template <class Index>
[[noreturn]] void throw_first_outside(const std::string& name, const Index* indices,
                                      int64_t num_indices, int64_t num_rows) {
  const Index* bad = std::find_if(indices, indices + num_indices, [&](Index index) {
    return index < 0 || static_cast<int64_t>(index) >= num_rows;
  });
  throw RowIndexError("table '" + name + "': index " + std::to_string(*bad) + " at position " +
                      std::to_string(bad - indices) + " of the lookup; allowed: 0 to " +
                      std::to_string(num_rows - 1) + " (num_rows is " + std::to_string(num_rows) +
                      ")");
}

}  // namespace

RowTracker::RowTracker(std::string name, int64_t num_rows)
    : name_(std::move(name)), num_rows_(num_rows) {
  if (num_rows < 1) {
    throw UsageError("a table without rows: num_rows of '" + name_ + "' is " +
                     std::to_string(num_rows) + "; it must be at least 1");
  }
}

void RowTracker::check(const Lookup& lookup) const {
  if (lookup.device != kHostMemory) return;
  visit_indices(lookup, [&](const auto* indices, int64_t num_indices) {
    if (any_outside(indices, num_indices, num_rows_)) {
      throw_first_outside(name_, indices, num_indices, num_rows_);
    }
  });
}

int64_t RowTracker::num_dirty(RowRange range) const {
  check_range(range);
  settle();
  return count_dirty(range);
}

std::vector<int64_t> RowTracker::num_dirty_of(const std::vector<TrackedRange>& ranges) {
  std::vector<int64_t> found(ranges.size());
  std::map<int, std::vector<size_t>> on_devices;
  for (size_t i = 0; i < ranges.size(); ++i) {
    const auto& [tracker, range] = ranges[i];
    tracker->check_range(range);
    tracker->settle();
    if (tracker->device() == kHostMemory) {
      found[i] = tracker->count_dirty(range);
    } else {
      on_devices[tracker->device()].push_back(i);
    }
  }
  for (const auto& [_, places] : on_devices) {
    std::vector<TrackedRange> of_device;
    for (const size_t place : places) of_device.push_back(ranges[place]);
    const std::vector<int64_t> counted = of_device.front().tracker->count_dirty_of(of_device);
    for (size_t i = 0; i < places.size(); ++i) found[places[i]] = counted[i];
  }
  return found;
}

bool RowTracker::are_clean(const std::vector<TrackedRange>& ranges) {
  std::vector<TrackedRange> on_devices;
  for (const auto& [tracker, range] : ranges) {
    if (tracker->device() != kHostMemory) {
      on_devices.push_back({tracker, range});
    } else if (!tracker->is_clean(range)) {
      return false;
    }
  }
  const std::vector<int64_t> counted = num_dirty_of(on_devices);
  return std::all_of(counted.begin(), counted.end(), [](int64_t dirty) { return dirty == 0; });
}

bool RowTracker::is_clean(RowRange range) const {
  check_range(range);
  settle();
  return has_no_dirty(range);
}

RowIdVector RowTracker::dirty_rows(RowRange range) const {
  check_range(range);
  settle();
  return list_dirty(range);
}

RowIdVector RowTracker::select(RowRange range, int64_t k, const WeightView* weight,
                               ThreadPool* pool) const {
  check_range(range);
  settle();
  return select_best(range, std::max<int64_t>(0, k), weight, pool);
}

std::unique_ptr<PendingRows> RowTracker::begin_select(RowRange range, int64_t k,
                                                      const WeightView* weight) const {
  check_range(range);
  settle();
  std::unique_ptr<PendingRows> pending = begin_select_best(range, std::max<int64_t>(0, k), weight);
  if (pending) pending->chooser = this;
  return pending;
}

TakenRows RowTracker::take(RowIds row_ids, const WeightView* weight, ThreadPool* pool) {
  for (int64_t i = 0; i < row_ids.size; ++i) {
    if (i > 0 && row_ids.data[i] <= row_ids.data[i - 1]) {
      throw UsageError("table '" + name_ + "': row_ids must be strictly ascending, but " +
                       std::to_string(row_ids.data[i]) + " at position " + std::to_string(i) +
                       " follows " + std::to_string(row_ids.data[i - 1]));
    }
  }
  check({row_ids.data, DType::kInt64, row_ids.size});
  settle();
  return clear_rows(row_ids, weight, pool);
}

TakenRows RowTracker::take_chosen(const ChosenRows& chosen, RowIds row_ids,
                                  const WeightView* weight) {
  if (chosen.all->chooser != this) {
    throw UsageError("table '" + name_ + "': the rows to take were chosen for another table");
  }
  if (chosen.first < 0 || chosen.first > chosen.all->num_rows() - row_ids.size) {
    throw UsageError("table '" + name_ + "': rows " + std::to_string(chosen.first) + " to " +
                     std::to_string(chosen.first + row_ids.size) + " are to be taken of " +
                     std::to_string(chosen.all->num_rows()) + " chosen ones that were read");
  }
  settle();
  return clear_chosen(chosen, row_ids, weight);
}

TakenRows RowTracker::take_range(RowRange range, const WeightView* weight, ThreadPool* pool) {
  check_range(range);
  settle();
  return clear_range(range, weight, pool);
}

void RowTracker::put_back(TakenRows& taken) {
  taken.settle();
  const bool from_here = taken.tracker == name_ && taken.kind == kind() &&
                         (taken.row_ids.empty() || taken.row_ids.back() < num_rows_);
  if (!from_here) {
    throw UsageError("these rows were taken from the " + taken.kind + " of table '" +
                     taken.tracker + "' and cannot be put back into the " + kind() + " of table '" +
                     name_ + "'");
  }
  settle();
  restore(taken);
  taken = nothing_taken();
}

void RowTracker::check_range(RowRange range) const {
  if (range.begin < 0 || range.begin > range.end || range.end > num_rows_) {
    throw UsageError("table '" + name_ + "': the range [" + std::to_string(range.begin) + ", " +
                     std::to_string(range.end) + ") is not inside its rows [0, " +
                     std::to_string(num_rows_) + ")");
  }
}

}  // namespace cpr_ext
