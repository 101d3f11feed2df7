// One bit per row: which rows have been observed since they were last taken. A tracker of its own
// where every dirty row is to be saved, and the memory of RowSampler and ChangeMeter.
#pragma once

#include <string>
#include <vector>

#include "core/huge_pages.h"
#include "core/row_id_vector.h"
#include "tracking/row_tracker.h"

namespace cpr_ext {

class DirtyRows final : public RowTracker {
 public:
  DirtyRows(std::string name, int64_t num_rows);

  const char* kind() const override { return "DirtyRows"; }
  int64_t memory_bytes() const override;
  void observe(const Lookup& lookup) override;

  // REQUIRES, for these three: 0 <= row_id < num_rows.
  bool is_dirty(int64_t row_id) const { return (words_[word_of(row_id)] & bit_of(row_id)) != 0; }
  void mark(int64_t row_id) { words_[word_of(row_id)] |= bit_of(row_id); }
  void clear(int64_t row_id) { words_[word_of(row_id)] &= ~bit_of(row_id); }

 private:
  static size_t word_of(int64_t row_id) { return static_cast<size_t>(row_id) >> 6; }
  static uint64_t bit_of(int64_t row_id) { return uint64_t{1} << (row_id & 63); }

  int64_t count_dirty(RowRange range) const override;
  bool has_no_dirty(RowRange range) const override;
  RowIdVector list_dirty(RowRange range) const override;
  RowIdVector select_best(RowRange range, int64_t k, const WeightView* weight,
                          ThreadPool* pool) const override;  // all score the same
  TakenRows clear_rows(RowIds row_ids, const WeightView* weight, ThreadPool* pool) override;
  TakenRows clear_range(RowRange range, const WeightView* weight, ThreadPool* pool) override;
  void restore(const TakenRows& taken) override;

  template <class Body>
  void for_each_word(RowRange range, Body&& body) const;

  std::vector<uint64_t, HugePageAllocator<uint64_t>> words_;
};

}  // namespace cpr_ext
