// The rows of one segment that are captured. Their trackers forget them chunk by chunk, the moment
// each is copied, and get them back if the segment fails.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "tracking/row_tracker.h"
#include "tracking/weight_view.h"

namespace cpr_ext {

// Of one thread at a time, which uses the trackers.
class CapturedRows {
 public:
  // What a segment holds of a table: the rows of `row_ids`, or all of `range`.
  struct Table {
    std::vector<RowTracker*> trackers;  // not owned
    std::optional<WeightView> weight;   // for those of them that need it
    RowRange range;
    const int64_t* row_ids = nullptr;  // (num_rows,), strictly ascending; not owned
    int64_t num_rows = 0;
    std::shared_ptr<const PendingRows> chosen;  // has `row_ids` on a device

    int64_t size() const { return row_ids == nullptr ? range.size() : num_rows; }
  };

  int num_tables() const { return static_cast<int>(tables_.size()); }
  void add_table(Table table);

  // Rows [first, first + count) of a table, by position, are captured. Throws UsageError if the
  // table has no such rows.
  void take(int table, int64_t first, int64_t count);
  void take_all();

  // The trackers get all back.
  void put_back();
  void forget();  // none will be put back

 private:
  struct Taken {
    RowTracker* tracker;
    TakenRows rows;
  };
  const Table& checked(int table) const;
  template <class Take>
  void take_from_all(const Table& table, Take&& take);

  std::vector<Table> tables_;
  std::vector<Taken> taken_;
};

}  // namespace cpr_ext
