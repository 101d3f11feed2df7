// SCAR: how far each dirty row has moved since it was last taken, at the price of one more copy of
// the weight.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/row_id_vector.h"
#include "tracking/dirty_rows.h"
#include "tracking/row_tracker.h"

namespace cpr_ext {

// The score is the L2 norm of (row now - row when last taken), plus what failed saves gave back: by
// the triangle inequality never less than the change since the last save that succeeded. A dirty
// row that has not moved still scores above zero, so it is selected after all others.
//
// select, take and take_range need the weight as it is now, of the shape and dtype given at
// construction, and throw NanError, with nothing changed, if a row they measure holds NaN.
class ChangeMeter final : public RowTracker {
 public:
  ChangeMeter(std::string name, const WeightView& weight);  // copies the weight

  const char* kind() const override { return "ChangeMeter"; }
  bool needs_weight() const override { return true; }
  int64_t memory_bytes() const override;
  void observe(const Lookup& lookup) override;

 private:
  int64_t count_dirty(RowRange range) const override;
  bool has_no_dirty(RowRange range) const override;
  RowIdVector list_dirty(RowRange range) const override;
  RowIdVector select_best(RowRange range, int64_t k, const WeightView* weight,
                          ThreadPool* pool) const override;
  TakenRows clear_rows(RowIds row_ids, const WeightView* weight, ThreadPool* pool) override;
  TakenRows clear_range(RowRange range, const WeightView* weight, ThreadPool* pool) override;
  void restore(const TakenRows& taken) override;

  std::vector<float> measure(const RowIdVector& row_ids, const WeightView& weight,
                             ThreadPool* pool) const;
  std::byte* baseline_row(int64_t row_id) const {
    return baseline_.get() + row_id * weight_.row_bytes();
  }
  void rebase(int64_t row_id, const WeightView& weight);

  MeasuredWeight weight_;
  std::unique_ptr<std::byte[]> baseline_;  // (num_rows, row_bytes), the rows when last taken
  DirtyRows dirty_;
  std::unordered_map<int64_t, float> carried_;  // given back by failed saves; only dirty rows
};

}  // namespace cpr_ext
