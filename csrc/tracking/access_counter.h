// MFU: how often each row was looked up since it was last taken.
#pragma once

#include <string>
#include <vector>

#include "core/huge_pages.h"
#include "core/row_id_vector.h"
#include "tracking/row_tracker.h"

namespace cpr_ext {

// Invariant: a row is dirty exactly if its count is above zero. Counts saturate at 2^32 - 1.
// Where few rows are dirty, they are found without reading all counts: a mark says that a group
// of 64 rows may have some.
class AccessCounter final : public RowTracker {
 public:
  AccessCounter(std::string name, int64_t num_rows);

  const char* kind() const override { return "AccessCounter"; }
  int64_t memory_bytes() const override;
  void make_memory() override { counts_.make_pages(); }
  void observe(const Lookup& lookup) override;

  const uint32_t* counts() const { return counts_.begin(); }  // (num_rows)
  int64_t sum_counts(RowRange range) const;

 private:
  int64_t count_dirty(RowRange range) const override;
  bool has_no_dirty(RowRange range) const override;
  RowIdVector list_dirty(RowRange range) const override;
  RowIdVector select_best(RowRange range, int64_t k, const WeightView* weight,
                          ThreadPool* pool) const override;
  TakenRows clear_rows(RowIds row_ids, const WeightView* weight, ThreadPool* pool) override;
  TakenRows clear_range(RowRange range, const WeightView* weight, ThreadPool* pool) override;
  void restore(const TakenRows& taken) override;

  uint64_t marks_of(int64_t word) const;
  template <class Body>
  void visit_groups(RowRange range, const Body& body) const;
  bool has_few_groups(RowRange range) const;
  void forget_clean_groups(const RowIdVector& row_ids);

  HugeZeros<uint32_t> counts_;
  // A byte for each group, to whole words: 0, no row is dirty.
  mutable std::vector<uint8_t> touched_;
  int64_t headroom_ = UINT32_MAX;  // Invariant: no count can saturate within this many lookups
};

}  // namespace cpr_ext
