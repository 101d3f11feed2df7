#include "tracking/captured_rows.h"

#include <string>
#include <utility>

#include "core/error.h"

namespace cpr_ext {

void CapturedRows::add_table(Table table) { tables_.push_back(std::move(table)); }

const CapturedRows::Table& CapturedRows::checked(int table) const {
  if (table < 0 || table >= num_tables()) {
    throw UsageError("table is " + std::to_string(table) + "; there are " +
                     std::to_string(num_tables()));
  }
  return tables_[table];
}

template <class Take>
void CapturedRows::take_from_all(const Table& table, Take&& take) {
  const WeightView* weight = table.weight ? &*table.weight : nullptr;
  for (RowTracker* tracker : table.trackers) {
    taken_.push_back({tracker, {}});  // first: what a tracker forgot must not be lost
    try {
      taken_.back().rows = take(tracker, weight);
    } catch (...) {
      taken_.pop_back();
      throw;
    }
  }
}

void CapturedRows::take(int table, int64_t first, int64_t count) {
  const Table& of = checked(table);
  if (first < 0 || count < 0 || first > of.size() - count) {
    throw UsageError("rows [" + std::to_string(first) + ", " + std::to_string(first + count) +
                     ") of table " + std::to_string(table) + ", which has " +
                     std::to_string(of.size()));
  }
  if (of.row_ids == nullptr) {
    const RowRange range{of.range.begin + first, of.range.begin + first + count};
    take_from_all(of, [&](RowTracker* tracker, const WeightView* weight) {
      return tracker->take_range(range, weight, nullptr);
    });
    return;
  }
  const RowIds row_ids{of.row_ids + first, count};
  take_from_all(of, [&](RowTracker* tracker, const WeightView* weight) {
    const bool has_chosen = of.chosen != nullptr && of.chosen->chooser == tracker;
    return has_chosen ? tracker->take_chosen({of.chosen, first, count}, row_ids, weight)
                      : tracker->take(row_ids, weight, nullptr);
  });
}

void CapturedRows::take_all() {
  for (int i = 0; i < num_tables(); ++i) take(i, 0, tables_[i].size());
}

void CapturedRows::put_back() {
  for (Taken& each : taken_) each.tracker->put_back(each.rows);
  forget();
}

void CapturedRows::forget() {
  std::vector<Taken>().swap(taken_);
  tables_.clear();
}

}  // namespace cpr_ext
